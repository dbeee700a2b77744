"""Models of many kinds at the MS-AMP levels: what becomes of their parameters, their gradients, and how they learn."""

import pytest
import torch
import torch.nn.functional as F
from support import MSAMP_LEVELS, Net, loader, save_at, train
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from nemo_lowprec.tensors import Fp8Weight, GradientTensor, QuantizedTensor

CASES = [*MSAMP_LEVELS, "msamp_o2+fp16", "msamp_o3+fp16"]


def tokens(x):
    """Eight tokens a sample, below 32."""
    return (x[:, :8].abs() * 10).long().clamp(max=31)


class Kind(Net):
    """A body of its own before the usual head; looks at its parameters in training."""

    fp32 = ()  # matrices that stay FP32
    converted = ()  # weights that O3 stores in FP8

    def __init__(self):
        super().__init__(optimizer=lambda p: torch.optim.AdamW(p, lr=3e-3))
        del self.inp, self.norm, self.mid, self.drop
        torch.manual_seed(3)
        self.build()
        self.grads = {}

    def forward(self, x):
        return self.head(self.body(x))

    def on_after_backward(self):
        named = dict(self.named_parameters())
        if not self.grads:
            scale = getattr(self.trainer.precision_plugin.engine.step.loss_scale, "scale", 1.0)
            self.grads = {n: p.grad.float().clone() / scale for n, p in named.items() if p.grad is not None}
        self.low = {n for n, p in named.items() if isinstance(p, QuantizedTensor) or p.dtype == torch.float16}
        self.fp8 = {n for n, p in named.items() if isinstance(p, Fp8Weight)}
        self.low_grads = {n for n, p in named.items() if isinstance(p.grad, GradientTensor)}


class Conv(Kind):
    def build(self):
        self.first, self.norm = nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.second = nn.ConvTranspose2d(16, 4, 3, padding=1)

    def body(self, x):
        return self.second(F.relu(self.norm(self.first(x.view(-1, 1, 4, 8))))).flatten(1)


class Embedding(Kind):
    def build(self):
        self.table, self.bag = nn.Embedding(32, 16, padding_idx=0), nn.EmbeddingBag(32, 128)

    def body(self, x):
        return self.table(tokens(x)).flatten(1) + self.bag(tokens(x))


class Recurrent(Kind):
    fp32 = tuple(f"lstm.weight_{part}_l0{way}" for part in ("ih", "hh") for way in ("", "_reverse"))

    def build(self):
        self.table = nn.Embedding(32, 16)
        self.lstm = nn.LSTM(16, 64, batch_first=True, bidirectional=True)

    def body(self, x):
        return self.lstm(self.table(tokens(x)))[0][:, -1]


class Attention(Kind):
    converted = (
        "attention.in_proj_weight", "attention.out_proj.weight", "layer.self_attn.in_proj_weight",
        "layer.self_attn.out_proj.weight", "layer.linear1.weight", "layer.linear2.weight",
    )  # fmt: skip

    def build(self):
        self.table = nn.Embedding(32, 128)
        self.attention = nn.MultiheadAttention(128, 4, batch_first=True)
        self.layer = nn.TransformerEncoderLayer(128, 4, 256, batch_first=True, dropout=0.0)

    def body(self, x):
        x = self.table(tokens(x))
        return self.layer(x + self.attention(x, x, x)[0]).mean(1)


class Direct(Kind):
    """Parameters in the hands of plain operations, as vision transformers have class tokens and positions."""

    def build(self):
        self.cls_token = nn.Parameter(torch.randn(1, 1, 128) * 0.1)
        self.position = nn.Parameter(torch.randn(1, 9, 128) * 0.1)
        self.table = nn.Embedding(32, 128)
        self.matrix = nn.Parameter(torch.randn(128, 128) * 0.1)
        self.several = nn.ParameterList(nn.Parameter(torch.randn(128, 128) * 0.1) for _ in range(2))

    def body(self, x):
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), self.table(tokens(x))], 1) + self.position
        x = x @ self.matrix + F.linear(x, self.matrix.t()) + self.position[:, :1] * self.table.weight.mean()
        return torch.einsum("bse,ed->bd", x, torch.stack(list(self.several)).sum(0)) / 9


class Tied(Kind):
    """An embedding is the head too."""

    def build(self):
        self.table = nn.Embedding(32, 128)
        self.head.weight = self.table.weight

    def body(self, x):
        return self.table(tokens(x)).mean(1)


class Llama(Kind):
    def build(self):
        del self.head
        sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 2}
        self.net = LlamaForCausalLM(LlamaConfig(vocab_size=32, max_position_embeddings=8, use_cache=False, **sizes))
        attention, mlp = (f"net.model.layers.0.{part}" for part in ("self_attn", "mlp"))
        self.converted = tuple(f"{attention}.{p}_proj.weight" for p in "qkvo") + tuple(
            f"{mlp}.{p}_proj.weight" for p in ("gate", "up", "down")
        )

    def forward(self, x):
        return self.net(input_ids=tokens(x)).logits[:, -1]


class GPT2(Kind):
    def build(self):
        del self.head
        config = GPT2Config(vocab_size=32, n_embd=64, n_layer=1, n_head=2, n_positions=8, use_cache=False)
        config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
        self.net = GPT2LMHeadModel(config)
        block = "net.transformer.h.0"
        self.converted = tuple(f"{block}.{p}.weight" for p in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"))

    def forward(self, x):
        return self.net(input_ids=tokens(x)).logits[:, -1]


KINDS = [Conv, Embedding, Recurrent, Attention, Direct, Tied, Llama, GPT2]


def fp32_gradients(kind):
    model = kind()
    batch = next(iter(loader(16)))
    model.loss(batch).backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_model_is_stored_as_declared_and_learns(kind, case, tmp_path):
    model, plain = kind(), kind()
    train(model, case, save_at(tmp_path, 6), data=loader(16), max_steps=6, max_epochs=-1)
    named = dict(model.named_parameters())
    matrices = {n for n, p in named.items() if p.dim() > 1} - set(kind.fp32)
    assert model.low == matrices and model.low_grads == matrices
    assert model.fp8 == (set(model.converted) if "o3" in case else set())

    want = fp32_gradients(kind)
    assert model.grads.keys() == want.keys()
    got, expected = (torch.cat([g[n].reshape(-1) for n in want]) for g in (model.grads, want))
    # Stored E4M3 has a relative error of 0.03 on average, FP8 GEMMs a few times that.
    assert (got - expected).norm() < (0.2 if model.converted else 0.05) * expected.norm()

    plain.on_after_backward = lambda: None
    train(plain, None, data=loader(16), max_steps=6, max_epochs=-1)
    assert model.losses[-1] < model.losses[0] - 0.2
    assert model.losses == pytest.approx(plain.losses, rel=0.01, abs=0.05)

    # The file opens in plain torch, and gives the same model.
    other = kind()
    other.load_state_dict(torch.load(tmp_path / "step=6.ckpt", weights_only=True)["state_dict"])
    assert all(torch.equal(a, b) for a, b in zip(other.parameters(), model.parameters(), strict=True))


@pytest.mark.parametrize("case", CASES)
def test_an_embedding_with_a_largest_norm_keeps_to_it(case):
    class Limited(Kind):
        def build(self):
            self.table = nn.Embedding(32, 128, max_norm=1.0)

        def body(self, x):
            return self.table(tokens(x)).mean(1)

        def on_before_zero_grad(self, optimizer):  # after the forward pass of this step, whose rows were limited
            self.norms = self.table.weight.detach().float().norm(dim=1)

    model = Limited()
    train(model, case, data=loader(16), max_steps=3, max_epochs=-1)
    used = tokens(next(iter(loader(16)))["x"]).unique()
    assert 0.9 < model.norms[used].max() < 1.1 and model.losses[-1] < model.losses[0]
    unused = [i for i in range(32) if i not in used]
    assert not unused or model.norms[unused].min() > 5


@pytest.mark.parametrize("case", CASES)
def test_weights_in_the_loss_and_in_place_changes_reach_the_weights(case):
    """A penalty on the weights; FP16 matrices are clamped in place, as FP16."""

    class Penalized(Net):
        def loss(self, batch):
            return super().loss(batch) + 1e-3 * sum(p.float().pow(2).sum() for p in self.parameters())

        def on_train_batch_end(self, outputs, batch, batch_idx):
            with torch.no_grad():
                self.head.weight.clamp_(-0.05, 0.05)
                torch._foreach_mul_([self.norm.weight], 0.5)

    state = train(Penalized(), case, max_steps=3).state["weights"]
    assert float(state["head.weight"].abs().max()) == float(torch.tensor(0.05, dtype=torch.float16))
    assert state["norm.weight"].max() < 0.2
