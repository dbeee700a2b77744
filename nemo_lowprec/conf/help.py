"""``--help`` of the subcommands that take Hydra overrides."""

from __future__ import annotations

import textwrap

from nemo_lowprec.conf.choices import GROUPS, choices_of

__all__ = ["help_of"]

_WIDTH = 80
_SETTINGS = {
    "precision.fp8_margin=1": "an argument of the level",
    "model.lr=1e-4": "of the model; model.config.num_hidden_layers=2 of its architecture",
    "data.micro_batch_size=4": "sequences of a batch on each process",
    "trainer.max_steps=400": "any argument of Lightning's Trainer",
    "nodes=2 gpus=8": "machines, and processes of each; with strategy=lowprec_sharded",
    "seed=1": "of the initial weights",
    "ckpt_path=last.ckpt": "resume from a checkpoint",
    "--config-dir FOLDER": "more choices: FOLDER/precision/mine.yaml is precision=mine",
    "--cfg job": "print the whole config, and do nothing",
    "-m": "one run for each combination of precision=msamp_o1,msamp_o2 seed=1,2",
}
_EXAMPLES = {
    "pretrain": (
        "nemo-lowprec pretrain",
        "nemo-lowprec pretrain precision=fp16_mixed model=gpt2_tiny",
        "nemo-lowprec pretrain -m precision=bf16_mixed,msamp_o2 trainer.max_steps=50",
    ),
    "audit": ("nemo-lowprec audit precision=msamp_o2",),
    "plan": (
        "nemo-lowprec plan model=llama3_70b precision=msamp_o3 gpus=8",
        "nemo-lowprec plan model=llama3_8b nodes=2 gpus=8 trainer.strategy.shard_size=8",
    ),
}
_ABOUT = {
    "pretrain": (
        "Trains a language model at a level of the precision chart, validates it, and writes checkpoints and logs "
        "to outputs/DATE/TIME_LEVEL/."
    ),
    "audit": (
        "Trains two steps and prints, column by column, what the level declares in the chart beside what was found in "
        "the run. No checkpoint is written."
    ),
    "plan": (
        "Prints the bytes that each process holds and sends in a training step, by column. Makes no weights, reads no "
        "data, needs no GPU, and writes nothing."
    ),
}


def help_of(command: str) -> str:
    """What ``nemo-lowprec COMMAND --help`` prints.

    Args:
        command: ``pretrain``, ``audit`` or ``plan``.
    """
    lines = [f"usage: nemo-lowprec {command} [GROUP=CHOICE ...] [SETTING=VALUE ...]", ""]
    lines += [*textwrap.wrap(_ABOUT[command], _WIDTH), "", "groups and their choices:"]
    for group in GROUPS:
        choices = ", ".join(choices_of(group))
        lines += textwrap.wrap(choices, _WIDTH, initial_indent=f"  {group:<12}", subsequent_indent=" " * 14)
    lines += ["", "settings (a few):"]
    for setting, about in _SETTINGS.items():
        if command == "pretrain" or setting not in ("-m", "ckpt_path=last.ckpt"):
            lines += textwrap.wrap(about, _WIDTH, initial_indent=f"  {setting:<25}", subsequent_indent=" " * 27)
    lines += ["", "examples:", *(f"  {example}" for example in _EXAMPLES[command])]
    return "\n".join(lines)
