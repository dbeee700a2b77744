"""SGD, Lion and Muon on two processes, whole models under DDP and shards under FSDP2, against one process."""

import pytest
import torch
from torch import nn, optim
from torch.distributed.fsdp import fully_shard

from nemo_lowprec.data.loader import ResumableLoader
from nemo_lowprec.models import muon_groups
from nemo_lowprec.optim import Lion, Muon
from nemo_lowprec.optim import muon as muon_module
from nemo_lowprec.report import Audit
from nemo_lowprec.tensors.dtensor import local_shard
from tests.processes import on_processes
from tests.strategies.test_sharded import Blocks, weights_of, wholes
from tests.support import Samples, assert_same, plugin, save_at, trainer

KINDS = {
    "sgd": lambda m: optim.SGD(m.parameters(), 0.05, momentum=0.9),
    "lion": lambda m: Lion(m.parameters(), 1e-3),
    "muon": lambda m: Muon(muon_groups(m), 1e-2, adamw_lr=1e-2),
}
CASES = [("msamp_o2", "lowprec_ddp"), ("msamp_o2", "lowprec_sharded"), ("msamp_o3", "lowprec_sharded")]


class Optimized(Blocks):
    def __init__(self, kind):
        super().__init__()
        self.experts = nn.Parameter(torch.randn(3, 128, 128, generator=torch.Generator().manual_seed(9)) / 40)
        self.kind, self.weights, self.states = kind, {}, {}

    def middle(self, x):
        x = x + torch.einsum("bi,eij->bj", x, self.experts)
        return super().middle(x)

    def configure_optimizers(self):
        return KINDS[self.kind](self)

    def on_train_end(self):
        self.weights = weights_of(self)
        state = self.optimizers().optimizer.state
        key = "exp_avg" if self.kind == "lion" else "momentum_buffer"
        self.states = wholes({n: state[p][key] for n, p in self.named_parameters() if key in state.get(p, {})})


def run(case, kind, strategy=None, rank=0, world=1, callbacks=(), ckpt=None, **options):
    model = Optimized(kind)
    if strategy is not None:
        options |= {"devices": world, "strategy": strategy, "use_distributed_sampler": False}
    data = ResumableLoader(Samples(32), 8 // world, 3, rank, world, global_batch_size=8)
    trainer(plugin(case), *callbacks, **options).fit(model, data, ckpt_path=ckpt)
    return {"weights": model.weights, "states": model.states, "losses": model.losses}


def everything(rank, place):
    found = {}
    for case, strategy in CASES:
        for kind in KINDS:
            watch = Audit()
            made = found[case, kind, strategy] = run(case, kind, strategy, rank, 2, [watch])
            findings = watch.report.findings
            made["wrong"] = [(f.column, f.part, f.declared, f.observed) for f in findings if not f.agrees]
            made["sent"] = {f.part: f.bytes_per_param for f in findings if f.column == "Comm"}
            made["further"] = watch.report.total_bytes.get("Comm, matrices that Muon orthogonalizes")
    for kind in KINDS:  # a resumed run, from a folder of shards
        folder = place / kind
        run("msamp_o2", kind, "lowprec_sharded", rank, 2, [save_at(folder, 2)], max_steps=2)
        found["resumed", kind] = run("msamp_o2", kind, "lowprec_sharded", rank, 2, ckpt=folder / "step=2.ckpt")
    found["plain"] = plain(rank)
    return found


def plain(rank, device="cpu"):
    """FSDP2 alone, in FP32: more matrices of a shape than processes, uneven rows, a row fewer than processes."""
    found = []
    for elements in (2**27, 1):
        muon_module._ELEMENTS = elements
        model = linears().to(device)
        if rank is not None:
            for layer in model:
                fully_shard(layer)
            fully_shard(model)
        optimizer = Muon(model.parameters(), 0.1)
        for step in range(2):
            optimizer.zero_grad()
            x = torch.randn(4, 24, generator=torch.Generator().manual_seed(step)).to(device)
            model(x).square().sum().backward()
            optimizer.step()
        found.append(wholes(dict(model.named_parameters())))
        if rank is not None:
            assert all(local_shard(p).shape[0] <= -(-p.shape[0] // 2) for p in model.parameters())
    return found


def linears():
    torch.manual_seed(4)
    sizes = [(24, 24), (24, 24), (24, 24), (24, 7), (7, 1), (1, 9)]
    return nn.Sequential(*(nn.Linear(a, b, bias=False) for a, b in sizes))


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    place = tmp_path_factory.mktemp("ranks")
    return on_processes(2, place, everything, place)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("case", "strategy"), CASES)
def test_two_processes_train_as_one(ranks, case, kind, strategy):
    got, other, want = ranks[0][case, kind, strategy], ranks[1][case, kind, strategy], run(case, kind)
    assert_same(got["weights"], other["weights"])
    assert not got["wrong"]
    # A quarter of each matrix goes to the process that orthogonalizes it, and comes back, 2 bytes an element each way.
    # Where the number of matrices of a shape is odd, zeros go along.
    model = Optimized(kind)
    muon = sum(p.numel() for p in muon_groups(model)[0]["params"] if p.dim() == 2)
    exchanges = kind == "muon" and strategy == "lowprec_sharded"
    assert muon <= got["further"] < 1.5 * muon if exchanges else got["further"] is None
    assert got["sent"]["matrices"] < 1.1 if strategy == "lowprec_sharded" else 2.2
    # Signs of gradients near zero turn. Gradients of few samples have a low rank: Newton–Schulz makes of the errors of
    # FP8 in all other directions as much as of the gradient.
    start, bound = weights_of(model), {"sgd": 0.4, "lion": 0.8, "muon": None}[kind]
    for name, param in model.named_parameters():
        value = want["weights"][name]
        if bound is not None and param.requires_grad:
            assert (got["weights"][name] - value).norm() <= bound * (value - start[name]).norm(), name
    assert got["states"].keys() == want["states"].keys() and got["states"]
    for name, value in want["states"].items():
        assert (got["states"][name] - value).norm() <= 0.4 * value.norm(), name
    mean = [(a + b) / 2 for a, b in zip(got["losses"], other["losses"], strict=True)]
    assert mean == pytest.approx(want["losses"], rel=0.05)


@pytest.mark.parametrize("kind", KINDS)
def test_a_sharded_run_resumes_bit_for_bit(ranks, kind):
    for rank in ranks:
        whole, again = rank["msamp_o2", kind, "lowprec_sharded"], rank["resumed", kind]
        assert_same(again["weights"], whole["weights"])
        assert_same(again["states"], whole["states"])


def test_matrices_are_orthogonalized_as_a_whole(ranks):
    assert_as_one_process(ranks[0]["plain"], plain(None))


def assert_as_one_process(found, wanted):
    """Weights after two steps of Muon."""
    for got, want in zip(found, wanted, strict=True):
        start = dict(linears().named_parameters())
        for name, value in want.items():
            moved = (value - start[name].detach()).norm()
            assert moved > 0 and (got[name] - value).norm() <= 0.02 * moved, name
