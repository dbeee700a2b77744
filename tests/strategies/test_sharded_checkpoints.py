"""A sharded run is saved in a folder or in one file, and goes on at any level and on any number of processes."""

import pytest
import torch
from lightning.pytorch.callbacks import Callback

from nemo_lowprec.checkpoint.sharded_folder import is_folder
from nemo_lowprec.data.loader import ResumableLoader
from nemo_lowprec.strategies import LowPrecisionShardedStrategy
from tests.processes import on_processes
from tests.strategies.test_sharded import ALL, Blocks, weights_of, wholes
from tests.support import Samples, assert_same, linear_optimizer, plugin_on, save_at, trainer

SOME = ["te_fp8", "msamp_o1", "msamp_o2", "msamp_o3", "fp16_mixed", "bf16_with_fp8_mixed+fp8_params"]
FORMS = {"folder": {}, "file": {"save_distributed_checkpoint": False}, "async": {"async_checkpoints": True}}


class End(Callback):
    """What there is at the end, and the weights at the step whose checkpoint is gone on from."""

    state, weights, held = None, {}, {}

    def on_train_batch_end(self, trainer, module, outputs, batch, index):
        if trainer.global_step == 2:
            self.held = weights_of(module)

    def on_train_end(self, trainer, module):
        self.weights = weights_of(module)
        self.state = trainer.precision_plugin.engine.state_dict()


def run(case, rank=None, world=2, *callbacks, ckpt=None, form="folder", adam=False, backend=None, **options):
    make = None if adam else linear_optimizer(case, 0.1)
    model, end = Blocks(dropout=0.2, optimizer=make), End()
    torch.manual_seed(5 + (rank or 0))
    if rank is not None:
        strategy = LowPrecisionShardedStrategy(**FORMS[form])
        options |= {"devices": world, "strategy": strategy, "use_distributed_sampler": False}
    data = ResumableLoader(Samples(32), 8 // world, 3, rank or 0, world, global_batch_size=8)
    trainer(plugin_on(backend, case), end, *callbacks, **options).fit(model, data, ckpt_path=ckpt)
    # A run that has nothing left to do ends before it trains; its model is given back in FP32.
    weights = end.weights or wholes(dict(model.named_parameters()))
    return {"weights": weights, "held": end.held, "losses": model.losses, "state": end.state}


def saved(place, case, form):
    return place / f"{case}-{form}" / "step=2.ckpt"


def resumed(case, rank, place, forms, **options):
    """A run, what it is when it goes on from its checkpoints in ``forms``, and the weights that these hold."""
    options["adam"] = True
    found = {"whole": run(case, rank, **options)}
    for form in forms:
        path = saved(place, case, form)
        held = run(case, rank, 2, save_at(path.parent, 2), form=form, max_steps=2, **options)
        found[form] = run(case, rank, ckpt=path, form=form, **options)
        found["held"] = held["held"]
    return found


def resumed_halfway(case, rank, place):
    """The same of a run that goes on by itself, too, after it was saved."""
    path = saved(place, case, "folder")
    whole = run(case, rank, 2, save_at(path.parent, 2), adam=True)
    return {"whole": whole, "held": whole["held"], "folder": run(case, rank, ckpt=path, adam=True)}


def every_case(rank, place):
    found = {case: resumed(case, rank, place, FORMS) for case in SOME}
    found |= {case: resumed_halfway(case, rank, place) for case in ALL if case not in SOME}
    found["other"] = {
        f"{a} to {b}": run(b, rank, ckpt=saved(place, a, "folder"), adam=True, max_steps=2)["weights"]
        for a, b in (("msamp_o3", "bf16_mixed"), ("bf16_mixed", "msamp_o2"), ("msamp_o2", "te_fp8"))
    }
    return found


def on_one(rank, place):
    """What a process alone, sharded too, finds in the folders that two have written."""
    return {
        case: run(case, rank, 1, ckpt=saved(place, case, "folder"), adam=True, max_steps=2)["weights"] for case in SOME
    }


class Everything(Callback):
    """Weights and optimizer states of the whole model, where a run starts and where it ends."""

    def on_train_start(self, trainer, module):
        self.start = self.now(trainer, module)

    def on_train_end(self, trainer, module):
        self.end = self.now(trainer, module)

    def now(self, trainer, module):
        names = {id(p): n for n, p in module.named_parameters()}
        states = {
            f"{names[id(param)]} {key}": state[key]
            for param, state in trainer.optimizers[0].state.items()
            for key in ("exp_avg", "exp_avg_sq")
        }
        return weights_of(module) | wholes(states)


def path_of(place, case, world):
    return place / f"{case}-{world}" / "step=2.ckpt"


def on_many(rank, world, place, source=None):
    """Two steps that are saved; or what a run that another number of processes has saved starts from."""
    found = {}
    for case in SOME:
        seen, options = Everything(), {"adam": True, "max_steps": 2}
        if source is None:
            run(case, rank, world, seen, save_at(path_of(place, case, world).parent, 2), **options)
            found[case] = seen.end
        else:
            run(case, rank, world, seen, ckpt=path_of(place, case, source), **(options | {"max_steps": 3}))
            found[case] = seen.start
    return found


@pytest.fixture(scope="module")
def by_world(tmp_path_factory, place):
    """Saved by four processes, and opened by four, two and one."""

    def on(world, **options):
        return on_processes(world, tmp_path_factory.mktemp("ranks"), on_many, world, place, *options.values())[0]

    return {"saved": on(4)} | {world: on(world, source=4) for world in (4, 2, 1)}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("saved")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory, place):
    return on_processes(2, tmp_path_factory.mktemp("ranks"), every_case, place)


@pytest.mark.parametrize(("case", "form"), [(c, f) for c in ALL for f in FORMS if f == "folder" or c in SOME])
def test_a_resumed_run_goes_on_bit_for_bit(ranks, place, case, form):
    assert is_folder(saved(place, case, form)) == (form != "file")
    assert not list(saved(place, case, form).parent.glob(".*"))
    for rank in ranks:
        whole, resumed = rank[case]["whole"], rank[case][form]
        assert resumed["losses"] == whole["losses"][2:]
        assert_same(resumed["weights"], whole["weights"])
        assert_same(resumed["state"], whole["state"])


@pytest.fixture(scope="module")
def alone(ranks, tmp_path_factory, place):
    return on_processes(1, tmp_path_factory.mktemp("one"), on_one, place)[0]


@pytest.mark.parametrize("case", SOME)
def test_one_process_opens_what_two_have_saved(ranks, alone, place, case):
    assert_same(alone[case], ranks[0][case]["held"])
    file = run(case, None, 1, ckpt=saved(place, case, "file"), adam=True, max_steps=2)
    assert_same(file["weights"], ranks[0][case]["held"])


@pytest.mark.parametrize("case", SOME)
@pytest.mark.parametrize("world", [4, 2, 1])
def test_what_four_processes_have_saved_opens_on_fewer(by_world, case, world):
    saved = by_world["saved"][case]
    assert len(saved) > 40 and all(v.isfinite().all() for v in saved.values())
    assert_same(by_world[world][case], saved)


def test_another_level_starts_from_the_same_values(ranks):
    for name, weights in ranks[0]["other"].items():
        source, _, target = name.partition(" to ")
        held = ranks[0][source]["held"]
        for key, value in held.items():
            want = value.half().float() if target == "msamp_o2" and value.dim() > 1 else value
            assert torch.equal(weights[key], want), (name, key)


def both_alone(rank):
    """Losses of a process alone, sharded and not: with the same number of threads, which sums depend on."""
    return {case: [run(case, r, 1, adam=True)["losses"] for r in (rank, None)] for case in SOME}


@pytest.fixture(scope="module")
def losses(tmp_path_factory):
    return on_processes(1, tmp_path_factory.mktemp("losses"), both_alone)[0]


@pytest.mark.parametrize("case", SOME)
def test_one_process_that_is_sharded_trains_as_one_that_is_not(losses, case):
    got, want = map(torch.tensor, losses[case])
    assert len(want) == 4
    assert torch.equal(got, want)
