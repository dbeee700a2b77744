"""README's table: what there is to see first, each row with the settings that both sides share and those of each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from benchmarks import expert_tables, lora_tables
from benchmarks.experts import BATCH as EXPERTS_BATCH
from benchmarks.experts import SEQUENCE as EXPERTS_SEQUENCE
from benchmarks.kernel_tables import OPTIMIZERS
from benchmarks.llama import BATCH, SEQUENCE
from benchmarks.loss_parity import BASELINE
from benchmarks.loss_tables import losses, trained
from benchmarks.megatron_tables import called
from benchmarks.megatron_tables import steps as megatron_steps
from benchmarks.memory import LIGHTNING
from benchmarks.memory_tables import on_one_gpu, saved, vision
from benchmarks.parallel_tables import FSDP2, averages, on_all_gpus
from benchmarks.record import RESULTS, read
from benchmarks.rst import block, failure, rst_table, times
from benchmarks.step_tables import TE, TORCHAO, steps
from nemo_lowprec.chart import CHART
from nemo_lowprec.comm.bucketing import BUCKET_BYTES

__all__ = ["Headline", "headlines", "rows"]

_STEP = f"a Llama-8B-shaped model, batch {BATCH} × {SEQUENCE}"
_SAME = "cuDNN attention, head in FP8"
_PLAIN = "torch's attention, head in BF16"
_FP32 = "FP32 weights, no masters, FP32 gradients, FP32+FP32 states"
_BF16 = "BF16 weights, no masters, BF16 gradients, BF16+BF16 states"


@dataclass(frozen=True)
class Headline:
    """One row: what is compared, the settings of both sides, then figure and settings of each, and the ratio."""

    claim: str
    shared: str
    figure: str
    settings: str
    other_figure: str
    other_settings: str
    ratio: str

    def cells(self) -> tuple[str, str, str, str]:
        return (
            f"**{self.claim}**\n\n{self.shared}",
            f"**{self.figure}**\n\n{self.settings}",
            f"**{self.other_figure}**\n\n{self.other_settings}",
            self.ratio,
        )


def headlines() -> str:
    """README's table of figures, below a sentence with the ratios, those below 1 included."""
    found = rows()
    te, torchao, megatron, fsdp2 = (found[key].ratio for key in ("te", "torchao", "megatron", "fsdp2"))
    takeaway = (
        f"With the same model, attention and head a step is {te} as fast as with Lightning's Transformer Engine, "
        f"{megatron} as with a bare Megatron-core loop, {torchao} as with torchao's compiled layers and {fsdp2} as "
        f"with Lightning's FSDP2 (below 1 is slower); ``msamp_o2`` saves memory (swin_1b: {found['swin_1b'].ratio}), "
        f"and its loss lies {losses()['msamp_o2']['gap_percent_mean']:+.2f} % from ``{BASELINE}``'s."
    )
    header = ("What is compared, settings of both", "nemo_lowprec", "Beside it", "Ratio")
    return block(takeaway, rst_table(header, [row.cells() for row in found.values()]))


def rows() -> dict[str, Headline]:
    """The rows of README's table of figures, by a short key."""
    return (
        _one_gpu() | _experts() | _fine_tuning() | _optimizers() | _memory() | _loss() | _several_gpus() | _megatron()
    )


def _formats(level: str) -> str:
    """What a level keeps of a converted weight, as the chart has it."""
    row = CHART[level].columns(fp8_params=False)
    masters = "no masters" if CHART[level].master_weight is None else f"{row['Master weight']} masters"
    return (
        f"{row['Weight']} weights, {masters}, {row['Weight gradient']} gradients, {row['Optimizer states']} states"
    )  # fmt: skip


def _step(figure: dict[str, Any], of: str = "") -> str:
    return f"{figure['ms']:.1f} ms, {figure['peak_gib']:.1f} GiB{of}"


def _one_gpu() -> dict[str, Headline]:
    found = steps()
    ours, te = found["nemo_lowprec msamp_o2, cuDNN attention, FP8 head"], found[f"{TE}, cuDNN attention"]
    o2, torchao = found["nemo_lowprec msamp_o2"], found[TORCHAO]
    return {
        "te": Headline(
            "Whole step, 1 GPU", f"{_STEP}, {_SAME}",
            _step(ours), f"``msamp_o2``: {_formats('msamp_o2')}",
            _step(te), f"Lightning's TransformerEnginePrecision: {_BF16}",
            times(ours, te, 3),
        ),
        "torchao": Headline(
            "Whole step, 1 GPU", f"{_STEP}, {_PLAIN}",
            _step(o2), f"``msamp_o2``, layers not compiled: {_formats('msamp_o2')}",
            _step(torchao), f"torchao float8, compiled layers, Lightning's ``bf16-true``: {_BF16}",
            times(o2, torchao, 3),
        ),
    }  # fmt: skip


def _experts() -> dict[str, Headline]:
    model, of = list(expert_tables.figures().items())[1]
    ours, other = of[expert_tables.DEFAULT], of[expert_tables.BF16]
    return {
        "experts": Headline(
            "Mixture of experts, whole step, 1 GPU",
            f"transformers' {model}, batch {EXPERTS_BATCH} × {EXPERTS_SEQUENCE}, head in BF16",
            f"{ours['ms']:.1f} ms, {ours['peak_mib'] / 1024:.1f} GiB",
            f"``bf16_with_fp8_mixed``: {_formats('bf16_with_fp8_mixed')}",
            f"{other['ms']:.1f} ms, {other['peak_mib'] / 1024:.1f} GiB",
            f"the model as it is: {_BF16}",
            f"{ours['x']:.2f} ×",
        )
    }


def _fine_tuning() -> dict[str, Headline]:
    ours, other = lora_tables.largest()
    return {
        "lora": Headline(
            "LoRA of Llama-3-8B, 1 GPU",
            f"rank {ours['rank']} on all linear layers, PEFT, AdamW, batch {ours['batch']} × {ours['sequence']}",
            f"{ours['ms']:.1f} ms, {ours['peak_gib']:.1f} GiB",
            f"``bf16_with_fp8_mixed``: the frozen base in FP8; adapters: {_formats('bf16_with_fp8_mixed')}",
            f"{other['ms']:.1f} ms, {other['peak_gib']:.1f} GiB",
            f"BF16 autocast: the frozen base in BF16; adapters: {_FP32}",
            f"{ours['x']:.2f} ×",
        )
    }


def _optimizers() -> dict[str, Headline]:
    figures = read(RESULTS / "optimizer_step_h200.jsonl")[1]
    found = {f["name"]: f for f in figures if "of_copy" in f}
    (count,) = (f["parameters"] for f in figures if f["benchmark"] == "optimizer_step_shapes")
    o3, te_low, ours, te = (found[OPTIMIZERS[key]] for key in ("o3", "te low-bit", "masters", "te masters"))
    claim, parameters = "Adam's step alone, 1 GPU", f"{count / 1e9:.1f} B parameters in Llama-1B's shapes"
    both = "BF16 weights and gradients, FP32 masters, FP32+FP32 states"

    def moved(figure: dict[str, Any]) -> str:
        temporaries = figure["temporaries_bytes_per_param"]
        return f"{figure['ms']:.2f} ms, {temporaries:.0f} bytes a parameter of temporaries"

    return {
        "adam": Headline(
            claim, parameters,
            moved(ours), f"``nemo_lowprec.optim.AdamW``: {both}",
            moved(te), f"Transformer Engine's FusedAdam: {both}",
            times(ours, te),
        ),
        "adam low-bit": Headline(
            claim, f"{parameters}, FP16 masters, FP8+FP16 states",
            moved(o3), f"``msamp_o3``: {_formats('msamp_o3')}",
            moved(te_low),
            "Transformer Engine's FusedAdam: FP16 weights, FP16 masters, FP16 gradients, FP8+FP16 states",
            times(o3, te_low),
        ),
    }  # fmt: skip


def _memory() -> dict[str, Headline]:
    found = {}
    for model, of in vision().items():
        ours, amp = of["msamp_o2"], of[LIGHTNING]
        found[model] = Headline(
            "Peak memory, 1 GPU",
            f"timm's {model}, {ours['parameters'] / 1e9:.2f} B parameters, batch {ours['batch']} of 224 × 224, timm's "
            "attention, head in half precision",
            f"{ours['peak_allocated_mb']:,} MB, {ours['ms']:.0f} ms",
            f"``msamp_o2``, FP8 GEMMs: {_formats('msamp_o2')}",
            f"{amp['peak_allocated_mb']:,} MB, {amp['ms']:.0f} ms",
            f"Lightning's ``{LIGHTNING}``, FP16 GEMMs: {_formats('fp16_amp')}",
            f"{saved(of, 'msamp_o2'):.1f} % saved at {ours['ms'] / amp['ms']:.2f} × the time",
        )
    large = on_one_gpu()
    ours, other = large["msamp_o2"], large["bf16_mixed"]
    found["llama_8b"] = Headline(
        "All of Llama-3-8B trained, 1 GPU",
        f"batch 1 × {ours['sequence']}, layers recomputed, AdamW, {_PLAIN}",
        f"{ours['peak_gib']:.1f} GiB, {ours['tokens_per_s']:,} tokens/s",
        f"``msamp_o2``: {_formats('msamp_o2')}",
        failure(other),
        f"``bf16_mixed``: {_formats('bf16_mixed')}",
        "–",
    )
    return found


def _loss() -> dict[str, Headline]:
    run, found = trained(), losses()
    ours, base = found["msamp_o2"], found[BASELINE]
    tokens = f"{run['steps']:,} steps of {run['tokens_per_step']:,} tokens"
    return {
        "loss": Headline(
            "Validation loss, 1 GPU",
            f"a Llama of {run['parameters'] / 1e6:.0f} M parameters, {tokens}, mean of {base['seeds']} seeds, {_PLAIN}",
            f"{ours['val_loss_mean']:.3f}", f"``msamp_o2``: {_formats('msamp_o2')}",
            f"{base['val_loss_mean']:.3f}", f"``{BASELINE}``: {_formats(BASELINE)}",
            f"{ours['gap_percent_mean']:+.2f} %; ``{BASELINE}``'s seeds lie {base['seed_spread_percent']:.2f} % apart",
        )
    }  # fmt: skip


def _several_gpus() -> dict[str, Headline]:
    gpus, of = max(averages().items())
    fp8, bf16 = of[f"fp8, buckets of {BUCKET_BYTES >> 20} MiB"], of["bf16 all_reduce"]
    found = on_all_gpus()
    o2, te = found["msamp_o2, lowprec_ddp"], found["te_fp8, lowprec_ddp"]
    ours, fsdp2 = found["bf16_mixed, lowprec_sharded"], found[FSDP2]
    each = f"{_STEP} a GPU"

    def sent(figure: dict[str, Any]) -> str:
        return f"{figure['ms']:.2f} ms, {figure['bytes_sent'] / 1e6:,.0f} MB sent, relative error {figure['error']:.4f}"

    return {
        "average": Headline(
            f"Gradients averaged, {gpus} GPUs",
            f"{fp8['elements'] / 1e6:.0f} M gradients that backward hands out in BF16",
            sent(fp8),
            f"FP8, quantization included, copies between GPUs, buckets of {BUCKET_BYTES >> 20} MiB",
            sent(bf16),
            "BF16, NCCL's all_reduce of one buffer that is there already",
            times(fp8, bf16),
        ),
        "parallel": Headline(
            f"Whole step, {o2['gpus']} GPUs", f"{each}, {_SAME}, ``lowprec_ddp``",
            _step(o2, " a GPU"), f"``msamp_o2``: {_formats('msamp_o2')}",
            _step(te, " a GPU"), f"``te_fp8``: {_formats('te_fp8')}",
            times(o2, te, 3),
        ),
        "fsdp2": Headline(
            f"Whole step, sharded over {ours['gpus']} GPUs", f"{each}, FP32 shards gathered in BF16, {_PLAIN}",
            _step(ours, " a GPU"), f"``bf16_mixed``, ``lowprec_sharded``: {_formats('bf16_mixed')}",
            _step(fsdp2, " a GPU"),
            f"Lightning's ModelParallelStrategy (FSDP2): {_formats('bf16_mixed')}",
            times(ours, fsdp2, 3),
        ),
    }  # fmt: skip


def _megatron() -> dict[str, Headline]:
    found = megatron_steps()
    settings = f"{_STEP} (GPTModel), Transformer Engine's attention, head in half precision"
    rows = {}
    for key, level in (("megatron", "bf16_with_fp8_mixed"), ("megatron msamp", "msamp_o2+fp16")):
        ours, bare = found[level, "MegatronStrategy"], found["bf16_with_fp8_mixed", "bare loop"]
        rows[key] = Headline(
            "Whole step on Megatron-core, 1 GPU", settings,
            _step(ours), f"``MegatronStrategy``, {called(level)}: {_formats(level.partition('+')[0])}",
            _step(bare), f"a bare Megatron-core loop, ``bf16_with_fp8_mixed``: {_formats('bf16_with_fp8_mixed')}",
            times(ours, bare, 3),
        )  # fmt: skip
    return rows
