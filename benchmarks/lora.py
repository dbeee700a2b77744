"""LoRA of rank 16 on all linear layers of Llama-3-8B: tokens a second and memory, beside BF16, on one GPU.

    python -m benchmarks.lora

The model has random weights, made in BF16 on the GPU; adapters are PEFT's, with its defaults. A step is forward, loss,
backward, the step of a fused AdamW and ``zero_grad``, in a plain loop. For each batch, with and without recomputation
of the layers in backward, the contestants run one after the other in one process, BF16 autocast first: ``x`` is the
other contestant's tokens a second over those of BF16. ``setup_peak_gib`` counts from the model in BF16 on, ``peak_gib``
and ``activations_gib``, which is the peak over what is held between steps, from step ``WARMUP`` on. A contestant that
fails has ``error`` in the place of figures. Without a GPU the model is small.
"""

from __future__ import annotations

import statistics
import time
import traceback
from collections.abc import Iterator
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from benchmarks.llama import loss_of
from benchmarks.measure import DEVICE, allocated, idle_in_graphs, peaks, release, reset_peak, sizes, synchronize
from benchmarks.record import Record, arguments
from nemo_lowprec import prepare
from nemo_lowprec.models.presets import get_preset
from nemo_lowprec.weights import master_of

SEQUENCE, RANK, GIB = 2048, 16, 2**30
WARMUP, ROUND = 14, 2  # steps: CUDA graphs come at the 13th at the latest
BF16 = "BF16 autocast, PEFT"
CONTESTANTS: dict[str, dict[str, Any] | None] = {
    BF16: None,
    "nemo_lowprec bf16_with_fp8_mixed": {"level": "bf16_with_fp8_mixed"},
    "nemo_lowprec msamp_o2": {"level": "msamp_o2"},
    "nemo_lowprec bf16_with_fp8_mixed, frozen=half": {"level": "bf16_with_fp8_mixed", "frozen": "half"},
    "nemo_lowprec bf16_with_fp8_mixed, weight_cache": {"level": "bf16_with_fp8_mixed", "weight_cache": True},
}
DEFAULT = list(CONTESTANTS)[:3]
_SMALL = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 256,
}  # fmt: skip


def adapted(layers: int | None, recomputes: bool) -> nn.Module:
    """The model under adapters, in training mode."""
    from transformers import AutoConfig, AutoModelForCausalLM

    preset = get_preset("llama3_8b")
    config = {**preset.config, "use_cache": False, "tie_word_embeddings": False}
    if DEVICE.type == "cpu":
        config |= _SMALL
    if layers is not None:
        config["num_hidden_layers"] = layers
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(preset.model_type, **config), attn_implementation="sdpa", dtype=torch.bfloat16
        )
        if recomputes:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        return get_peft_model(model, LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear")).train()


def batches(batch: int, sequence: int, vocab: int) -> Iterator[Tensor]:
    generator = torch.Generator(DEVICE).manual_seed(0)
    while True:
        yield torch.randint(vocab, (batch, sequence + 1), generator=generator, device=DEVICE)


def held(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """GiB by part, between steps."""
    params = dict(model.named_parameters())
    base = [p for name, p in params.items() if ".base_layer." in name]
    adapters = [p for p in params.values() if p.requires_grad]
    found = sizes(
        base=base,
        adapters=adapters,
        embeddings_and_head=params.values(),
        masters=[master for p in adapters if (master := master_of(p)) is not None],
        optimizer_states=optimizer.state.values(),
    )
    return {name: round(size / GIB, 3) for name, size in found.items()}


def measure(
    options: dict[str, Any] | None, batch: int, recomputes: bool, rounds: int, sequence: int, layers: int | None
) -> dict[str, Any]:
    """The figures of a contestant."""
    release()
    reset_peak()
    start = time.perf_counter()
    model: Any = adapted(layers, recomputes)
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=1e-5, fused=DEVICE.type == "cuda"
    )  # fmt: skip
    if options is not None:
        model, optimizer = prepare(model, optimizer, **options)
    setup_peak = peaks()[0]
    tokens = batches(batch, sequence, model.config.vocab_size)

    def steps(count: int) -> Tensor:
        for _ in range(count):
            with torch.autocast(DEVICE.type, torch.bfloat16):
                loss = loss_of(model, next(tokens))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    loss = steps(WARMUP).item()
    release()
    between = allocated()
    reset_peak()
    seconds = []
    synchronize()
    setup_s = time.perf_counter() - start
    for _ in range(rounds):
        begin = time.perf_counter()
        steps(ROUND)
        synchronize()
        seconds.append((time.perf_counter() - begin) / ROUND)
    graphs = idle_in_graphs()
    peak, median = peaks()[0] + graphs, statistics.median(seconds)
    return {
        "tokens_per_s": round(batch * sequence / median), "ms": round(median * 1e3, 1),
        "ms_min": round(min(seconds) * 1e3, 1), "ms_max": round(max(seconds) * 1e3, 1), "rounds": rounds,
        "peak_gib": round(peak / GIB, 2), "held_gib": round(between / GIB, 2),
        "activations_gib": round((peak - between) / GIB, 2), "in_graphs_gib": round(graphs / GIB, 2),
        "setup_peak_gib": round(setup_peak / GIB, 2), "setup_s": round(setup_s, 1), "loss": round(loss, 4),
        "gib": held(model, optimizer), "parameters": sum(p.numel() for p in model.parameters()),
        "trained": sum(p.numel() for p in model.parameters() if p.requires_grad),
    }  # fmt: skip


def main() -> None:
    parser = arguments(__doc__.split("\n")[0], "lora_h200.jsonl")
    parser.add_argument("--contestants", nargs="*", default=DEFAULT, choices=list(CONTESTANTS))
    parser.add_argument("--batches", nargs="*", type=int, default=[1, 4])
    parser.add_argument("--rounds", type=int, default=3, help=f"rounds of {ROUND} steps; {WARMUP} steps come before")
    parser.add_argument("--sequence", type=int, default=SEQUENCE)
    parser.add_argument("--layers", type=int, help="Llama-3-8B's without")
    args = parser.parse_args()
    record = Record(args.out)
    for recomputes in (False, True):
        for batch in args.batches:
            plain: float | None = None
            for name in args.contestants:
                about = {"benchmark": "lora", "name": name, "batch": batch, "recomputes": recomputes}
                try:
                    found = measure(
                        CONTESTANTS[name], batch, recomputes, args.rounds, args.sequence, args.layers
                    )  # fmt: skip
                except Exception as error:
                    traceback.print_exc()
                    record.add(**about, error=f"{type(error).__name__}: {error}"[:300])
                    continue
                plain = found["tokens_per_s"] if name == BF16 else plain
                x = None if plain is None else round(found["tokens_per_s"] / plain, 3)
                record.add(**about, sequence=args.sequence, rank=RANK, x=x, **found)


if __name__ == "__main__":
    main()
