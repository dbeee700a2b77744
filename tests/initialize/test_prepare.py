"""``prepare``: every level in a loop without Lightning, as torch's own loop has it."""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import nemo_lowprec
from nemo_lowprec import prepare
from nemo_lowprec.engine import Engine
from nemo_lowprec.weights import master_of
from tests.faces import batches, make_model, make_optimizer
from tests.processes import on_processes
from tests.support import CASES, Samples, assert_same, clone, is_low_bit, level_of, plugin

SAMPLES = Samples()
WHOLE = [case for case in CASES if not is_low_bit(case)]  # whose loss is computed under the level's autocast
SCALED = [case for case in CASES if level_of(case).has_loss_scale]


def net():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(32, 128), nn.LayerNorm(128), nn.ReLU(), nn.Linear(128, 128), nn.Linear(128, 32))


def options_of(case):
    fp8 = {"backend": "reference"} if level_of(case).has_fp8 else {}
    return {"level": case.partition("+")[0], **fp8, **({"fp8_params": True} if "fp8_params" in case else {})}


def start(case, kind=torch.optim.AdamW, **options):
    model = net()
    return prepare(model, kind(model.parameters(), lr=1e-2), **options_of(case), **options)


def loss_of(model, rows=slice(None)):
    return F.cross_entropy(model(SAMPLES.x[rows]).float(), SAMPLES.y[rows])


def step(model, optimizer, scaler=None):
    loss = loss_of(model)
    if scaler is None:
        loss.backward()
        optimizer.step()
    else:
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    optimizer.zero_grad()
    return loss.item()


@pytest.mark.parametrize("case", CASES)
def test_a_plain_loop_learns(case):
    model, optimizer = start(case)
    losses = [step(model, optimizer) for _ in range(6)]
    assert losses[-1] < 0.6 * losses[0]


@pytest.mark.parametrize("case", [case for case in WHOLE if case not in SCALED and "nvfp4" not in case])
def test_the_loop_makes_the_steps_of_the_engine_behind_lightning(case):
    model, optimizer = start(case)
    twin, engine = net(), plugin(case).engine
    engine.convert(twin, torch.device("cpu"))
    engine.settle()
    other = torch.optim.AdamW(twin.parameters(), lr=1e-2)
    engine.attach(other)
    for _ in range(3):
        mine = step(model, optimizer)
        with engine.forward_context():
            loss = loss_of(twin)
        engine.step.scale(loss).backward()
        engine.step.run(other)
        other.zero_grad()
        assert mine == loss.item()
    assert_same(dict(model.state_dict()), dict(twin.state_dict()))


@pytest.mark.parametrize("case", SCALED)
@pytest.mark.parametrize("fused", [False, True])
def test_torchs_grad_scaler_unscales_clips_and_skips(case, fused):
    model = net()
    model, optimizer = prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused), **options_of(case))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    losses = []
    for _ in range(6):
        loss = loss_of(model)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        assert 0 < norm < 100  # of true gradients
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0] and scaler.get_scale() == 1024.0
    before = clone(dict(model.state_dict()))
    scaler.scale(loss_of(model) * float("inf")).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 512.0
    assert_same(clone(dict(model.state_dict())), before)


def test_other_optimizers_are_unscaled_as_torch_does():
    model = net().half()
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(model[0].weight.sum()).backward()
    with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
        scaler.unscale_(optimizer)


@pytest.mark.parametrize("case", ["te_fp8", "bf16_mixed", "bf16_with_fp8_mixed+fp8_params", "fp16_mixed"])
def test_a_resumed_loop_goes_on_bit_for_bit(case):
    model, optimizer = start(case)
    for _ in range(3):
        step(model, optimizer)
    saved = clone([dict(model.state_dict()), optimizer.state_dict()])
    want = [step(model, optimizer) for _ in range(2)]
    other, its = start(case)
    other.load_state_dict(saved[0])
    its.load_state_dict(saved[1])
    assert [step(other, its) for _ in range(2)] == want


def test_a_resumed_loop_joins_the_layers_that_computed_as_one():
    def loop(state=None):
        model = make_model("llama")
        model, optimizer = prepare(model, make_optimizer(model), "bf16_with_fp8_mixed")
        if state is not None:
            model.load_state_dict(state[0])
            optimizer.load_state_dict(state[1])
        return model, optimizer

    def train(model, optimizer, batch):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    mine = loop()
    train(*mine, batches("llama")[0])
    other = loop(clone([dict(mine[0].state_dict()), mine[1].state_dict()]))
    assert [train(*other, b) for b in batches("llama")[1:3]] == [train(*mine, b) for b in batches("llama")[1:3]]


@pytest.mark.parametrize("case", ["bf16_mixed", "bf16_with_fp8_mixed"])
def test_optimizers_that_evaluate_the_loss_see_the_latest_weights(case):
    model, optimizer = start(case, torch.optim.LBFGS, attention="auto") if "fp8" in case else start(
        case, torch.optim.LBFGS
    )  # fmt: skip
    seen = []

    def closure():
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        seen.append((loss.item(), [p.detach().clone() for p in model.parameters()]))
        return loss

    optimizer.step(closure)
    assert len(seen) > 2 and seen[-1][0] < seen[0][0]
    assert not torch.equal(seen[0][1][0], seen[1][1][0])


@pytest.mark.parametrize("case", WHOLE)
def test_the_forward_runs_in_the_levels_half_format_and_gives_fp32(case):
    model, _ = start(case)
    dtypes = []
    model[3].register_forward_hook(lambda module, args, out: dtypes.append(out.dtype))
    assert model(SAMPLES.x).dtype == torch.float32
    assert dtypes == [Engine.of(model).half]
    with torch.autocast("cpu", torch.float16):
        model(SAMPLES.x)
    twin = copy.deepcopy(model)
    assert twin(SAMPLES.x).dtype == torch.float32 and not torch.is_autocast_enabled("cpu")


def test_a_copy_that_was_written_through_data_is_named():
    model, optimizer = start("bf16_mixed")
    step(model, optimizer)
    model[0].weight.data.add_(1.0)
    with pytest.raises(RuntimeError, match=r"0\.weight was written in place through \.data"):
        step(model, optimizer)
    assert master_of(model[0].weight) is not None


def test_what_a_loop_cannot_have_is_refused():
    model = net()
    for options, error, message in [
        ({"level": "bf16"}, ValueError, "Unknown precision level"),
        ({"level": "fp16_mixed", "loss_scale": 8.0}, TypeError, "A loop takes no 'loss_scale'"),
        ({"level": "msamp_o2", "half": "fp16"}, TypeError, "A loop takes no 'half'"),
        ({"level": "bf16_mixed", "fp8_margin": 1}, TypeError, "takes no 'fp8_margin'"),
    ]:
        with pytest.raises(error, match=message):
            prepare(model, **options)
    assert all(type(p) is nn.Parameter and p.dtype == torch.float32 for p in model.parameters())
    prepare(model, level="bf16_mixed")
    with pytest.raises(ValueError, match="converted already"):
        prepare(model, level="bf16_mixed")


def on_two(rank):
    found = {}
    for case in ("te_fp8", "fp16_mixed", "bf16_mixed", "bf16_with_fp8_mixed", "msamp_o2"):
        torch.manual_seed(rank)
        model, optimizer = start(case)
        ddp = DistributedDataParallel(model)
        losses = []
        for i in range(4):
            rows = slice(8 * rank, 8 * rank + 8)
            if i == 2:  # accumulates
                with ddp.no_sync():
                    loss_of(ddp, rows).backward()
            loss = loss_of(ddp, rows)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        found[case] = {"losses": losses, "weights": clone(dict(model.state_dict()))}
    return found


def test_ddp_averages_at_every_kind_of_level(tmp_path):
    first, second = on_processes(2, tmp_path, on_two)
    for case, mine in first.items():
        assert_same(mine["weights"], second[case]["weights"])
        assert mine["losses"][-1] < mine["losses"][0]
        assert mine["losses"] != second[case]["losses"]


def test_the_package_has_it():
    assert nemo_lowprec.prepare is prepare


def test_layers_that_are_trained_in_evaluation_mode_are_warned_of_once():
    def train(level, evaluates):
        model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32), nn.Linear(32, 4))
        model, optimizer = nemo_lowprec.prepare(model, level=level, backend="reference")
        model.train(not evaluates)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(3):
                model(torch.randn(16, 32)).sum().backward()
                optimizer.step()
        return [str(w.message) for w in caught if "evaluation mode" in str(w.message)]

    (message,) = train("bf16_with_fp8_mixed", evaluates=True)
    assert message.startswith("bf16_with_fp8_mixed: 2 of the converted layers") and "model.train()" in message
    assert train("bf16_with_fp8_mixed", evaluates=False) == []
    assert train("bf16_with_fp8_current_scaling_mixed", evaluates=True) == []
