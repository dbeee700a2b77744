"""torch's attention and transformer blocks at every level: trained, and evaluated as they are trained."""

import pytest
import torch
import torch.nn.functional as F
from support import CASES, Net, level_of, loader, plugin, train, trainer
from torch import nn

import nemo_lowprec
from nemo_lowprec.compute.backends.reference import ReferenceBackend
from nemo_lowprec.plugins import LEVELS
from nemo_lowprec.report import Audit
from nemo_lowprec.tensors import Fp8Weight

AT_CASES = pytest.mark.parametrize("case", CASES)
GEMMS = (
    1 + 4 + 4 + 2 + 3
)  # of a linear layer, an encoder layer, the second one, attention over itself, and with a memory


class Attentive(Net):
    """Every way into torch's attention that evaluation has."""

    def __init__(self, **options):
        super().__init__(**options)
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.alone = nn.MultiheadAttention(32, 4, batch_first=True)
        self.memory = nn.MultiheadAttention(32, 2, batch_first=True)
        self.inp = nn.Linear(32, 32)
        self.norm = self.mid = nn.Identity()
        self.head = nn.Linear(32, 32)
        self.outputs = []

    def forward(self, x):
        x = self.inp(torch.stack([x, x.roll(1, 1), x.roll(2, 1), x * 0.5], 1))
        padding = torch.tensor([False, False, False, True]).expand(len(x), -1)
        x = self.encoder(x, src_key_padding_mask=padding)
        x = x + self.alone(x, x, x, need_weights=False)[0]
        x = x + self.memory(x[:, :1], x, x, key_padding_mask=padding)[0]
        out = self.head(x[:, :3].mean(1))
        self.outputs.append(out.detach().float())
        return out


@pytest.fixture
def gemms(monkeypatch):
    calls = []
    fprop = ReferenceBackend.fprop
    monkeypatch.setattr(ReferenceBackend, "fprop", lambda self, *args: calls.append(1) or fprop(self, *args))
    return calls


@AT_CASES
def test_evaluation_computes_as_training_does(case, gemms):
    model, precision, data = Attentive(), plugin(case), loader(16)
    fp8 = GEMMS if level_of(case).has_fp8 else 0
    one = trainer(precision, max_steps=1, num_sanity_val_steps=0)
    one.fit(model, data, data)
    assert len(gemms) == 2 * fp8 and len(model.outputs) == 2  # a step, and validation behind it
    # Outside of the Trainer it is the plain model again.
    assert type(model.alone) is nn.MultiheadAttention and model.encoder.use_nested_tensor
    assert all(layer.activation_relu_or_gelu == 1 for layer in model.encoder.layers)
    gemms.clear(), model.outputs.clear()
    # The same weights in training mode are what evaluation has to agree with.
    model.eval = lambda: model.train()
    precision.engine.convert(model, torch.device("cpu"), training=False)
    precision.engine.settle()
    with torch.no_grad(), precision.forward_context():
        want = model(next(iter(data))["x"]).float()
    del model.eval
    precision.engine.revert()
    gemms.clear(), model.outputs.clear()
    for stage in (one.validate, one.test, one.predict):
        stage(model, data, **({} if stage == one.predict else {"verbose": False}))
        assert len(gemms) == fp8 and len(model.outputs) == 1
        assert (model.outputs[0] - want).norm() < 0.02 * want.norm()
        gemms.clear(), model.outputs.clear()


OPTIONS = {"max_steps": 6, "max_epochs": -1}


@pytest.fixture(scope="module")
def plain():
    model = Attentive()
    train(model, None, data=loader(16), **OPTIONS)
    return model


@AT_CASES
def test_it_learns_as_in_fp32_and_the_audit_agrees(case, plain):
    model, audit = Attentive(), Audit()
    seen = train(model, case, audit, data=loader(16), **OPTIONS)
    assert audit.report.agrees, str(audit.report)
    assert model.losses[-1] < model.losses[0] - 0.1
    four_bits = "nvfp4" in case
    assert model.losses == pytest.approx(plain.losses, rel=0.03, abs=0.15 if four_bits else 0.05)
    want = plain.state_dict()
    assert list(seen.state["weights"]) == list(want)
    Attentive().load_state_dict(seen.state["weights"])


@pytest.mark.parametrize("case", [c for c in CASES if "fp8_params" in c or level_of(c).weight == "fp8"])
def test_its_projections_are_stored_in_fp8_where_weights_are(case):
    found = set()

    class Look(Attentive):
        def on_train_batch_end(self, *_):
            found.update(n for n, p in self.named_parameters() if isinstance(p, Fp8Weight))

    train(Look(), case, max_steps=1)
    attention = ("encoder.layers.0.self_attn", "encoder.layers.1.self_attn", "alone", "memory")
    assert found >= {f"{a}.{w}" for a in attention for w in ("in_proj_weight", "out_proj.weight")}
    assert "head.weight" not in found


@pytest.mark.parametrize("name", LEVELS)
def test_an_attention_of_the_users_own_evaluates(name):
    """It is left alone, and may take torch's fused kernel: with weights of one dtype."""

    class Own(nn.MultiheadAttention):
        def forward(self, x):
            return super().forward(x, x, x)[0]

    class OwnNet(Attentive):
        def __init__(self):
            super().__init__()
            self.alone = nn.Identity()
            self.own = Own(32, 4, batch_first=True)

        def forward(self, x):
            return self.head(self.own(self.inp(x)[:, None].expand(-1, 3, -1)).mean(1))

    model = OwnNet()
    one = trainer(plugin(name), max_steps=1)
    one.fit(model, loader(), loader())
    [found] = one.validate(model, loader(16), verbose=False)
    data = loader(16).dataset
    with torch.no_grad():
        assert found["val/loss"] == pytest.approx(float(F.cross_entropy(model(data.x), data.y)), rel=0.02)


@pytest.mark.parametrize("grad", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_a_plain_loop_evaluates_with_converted_layers(level, grad, gemms):
    model = Attentive()
    model, optimizer = nemo_lowprec.initialize(model, torch.optim.AdamW(model.parameters()), opt_level=level)
    x = loader(16).dataset.x
    for _ in range(2):
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            want = model.train()(x)
            gemms.clear()
            with grad():
                got = model.eval()(x)
        assert len(gemms) == GEMMS and torch.equal(got, want)
