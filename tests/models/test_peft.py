"""LoRA of Hugging Face's PEFT: trained, merged and saved at every level as in FP32."""

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from support import CASES, plugin, replay, trainer
from transformers import LlamaConfig, LlamaForCausalLM


def llama():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        initializer_range=0.2, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


TOKENS = torch.randint(0, 8, (8, 4, 17), generator=torch.Generator().manual_seed(1))


class Adapted(pl.LightningModule):
    """A frozen base in BF16 or FP32, LoRA beside all of its layers; merged when training ends."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.model = get_peft_model(llama().to(dtype), LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"))
        self.merged = {}

    def training_step(self, batch, index):
        logits = self.model(input_ids=batch[:, :-1]).logits
        return F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())

    def configure_optimizers(self):
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)

    def on_train_end(self):
        self.merged = self.model.merge_and_unload().state_dict()


def trained(precision, tmp_path, dtype=torch.float32):
    module = Adapted(dtype)
    fit = trainer(precision, max_steps=len(TOKENS))
    fit.fit(module, replay(TOKENS))
    fit.save_checkpoint(tmp_path / "merged.ckpt")
    prefix = "model.base_model.model."
    saved = torch.load(tmp_path / "merged.ckpt", weights_only=True)["state_dict"]
    return module, {name.removeprefix(prefix): value for name, value in saved.items() if name.startswith(prefix)}


def loss_of(state):
    model = llama().eval()
    model.load_state_dict({name: value.float() for name, value in state.items()})
    with torch.no_grad():
        logits = model(input_ids=TOKENS.flatten(0, 1)[:, :-1]).logits
    return F.cross_entropy(logits.flatten(0, 1), TOKENS.flatten(0, 1)[:, 1:].flatten()).item()


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Losses of the base, and of what FP32 merges."""
    return loss_of(llama().state_dict()), loss_of(trained(None, tmp_path_factory.mktemp("plain"))[1])


@pytest.mark.parametrize(("case", "dtype"), zip(CASES, [torch.float32, torch.bfloat16] * len(CASES), strict=False))
def test_a_merged_adapter_is_what_is_saved_and_given_back(tmp_path, plain, case, dtype):
    base, want = plain
    assert base - want > 0.5
    module, saved = trained(plugin(case), tmp_path, dtype)
    after = module.model.base_model.model.state_dict()
    for state in (saved, after):
        assert {value.dtype for value in state.values()} == {dtype}
    for state in (module.merged, saved, after):
        assert loss_of(state) == pytest.approx(want, abs=0.1 * (base - want))
