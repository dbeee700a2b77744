"""``--help`` of the subcommands that take Hydra overrides."""

from __future__ import annotations

from nemo_lowprec.conf.choices import GROUPS, choices_of
from nemo_lowprec.lines import help_page

_SETTINGS = {
    "precision.fp8_margin=1": "an argument of the level",
    "model.lr=1e-4": "of the model; model.config.num_hidden_layers=2 of its architecture",
    "data.micro_batch_size=4": "sequences of a batch on each process",
    "trainer.max_steps=400": "any argument of Lightning's Trainer",
    "nodes=2 gpus=8": "machines, and processes of each; with strategy=lowprec_sharded",
    "seed=1": "of the initial weights",
    "ckpt_path=last.ckpt": "resume from a checkpoint",
    "monitor=on": "note what each layer loses to rounding, for report",
    "--config-dir FOLDER": "more choices: FOLDER/precision/mine.yaml is precision=mine",
    "--cfg job": "print the whole config, and do nothing",
    "-m": "one run for each combination of precision=msamp_o1,msamp_o2 seed=1,2",
}
_OF_PRETRAIN = ("monitor", "monitor=on", "-m", "ckpt_path=last.ckpt")  # groups and settings
_OF_ONE_RUN = ("seed=1", "--cfg job")
_JSON = {"--json": "one line of JSON on stdout, and everything else on stderr"}
_OF_COMPARE = {
    "seeds=3": "trains with the seeds 1, 2 and 3; seeds=7,8 with 7 and 8",
    "output_dir=FOLDER": "of the comparison; the same command goes on in it",
    "RUN1 RUN2 ...": "in place of settings: folders of monitored runs",
    "--out FILE": "the page (default: compare.html in the folder)",
    "--nemo-run": "the trainings as tasks of a nemo_run experiment",
}
_OF_PLAN = {
    "fits=80": "GiB of a GPU, or H100 or H200: which plans fit",
    "precision=A,B gpus=1,8": "lists: one table of all combinations, cheapest first",
}
_OF_ADVISE = {
    "gpu_memory=80": "GiB of the GPU, or H100 or H200; that of this machine without",
    "precision=A,B": "the levels to compare; all without",
    "ckpt_path=last.ckpt": "weights to look at; new ones without",
}
_OF_PROFILE = {"out=FOLDER": "keeps the profiles; in a run's folder they are a part of its report"}
_OWN = {"plan": _OF_PLAN, "advise": _OF_ADVISE, "compare": _OF_COMPARE, "audit": _JSON, "doctor": _JSON,
        "profile": _OF_PROFILE | _JSON}  # fmt: skip
_EXAMPLES = {
    "pretrain": (
        "nemo-lowprec pretrain",
        "nemo-lowprec pretrain precision=fp16_mixed model=gpt2_tiny",
        "nemo-lowprec pretrain -m precision=bf16_mixed,msamp_o2 trainer.max_steps=50",
    ),
    "audit": ("nemo-lowprec audit precision=msamp_o2", "nemo-lowprec audit precision=msamp_o2 --json"),
    "doctor": ("nemo-lowprec doctor", "nemo-lowprec doctor model=llama_100m data.seq_length=4096 --json"),
    "compare": (
        "nemo-lowprec compare precision=bf16_mixed,bf16_with_fp8_mixed seeds=3",
        "nemo-lowprec compare outputs/run1 outputs/run2",
    ),
    "profile": (
        "nemo-lowprec profile",
        "nemo-lowprec profile model=llama_100m data.seq_length=2048 precision=msamp_o2 out=outputs/profile",
    ),
    "plan": (
        "nemo-lowprec plan model=llama3_70b precision=msamp_o3 gpus=8",
        "nemo-lowprec plan model=llama3_8b nodes=2 gpus=8 trainer.strategy.shard_size=8",
        "nemo-lowprec plan model=llama3_8b precision=te_fp8,msamp_o2 gpus=1,8 fits=80",
    ),
    "advise": (
        "nemo-lowprec advise model=llama_100m data=stdlib",
        "nemo-lowprec advise gpu_memory=80 precision=bf16_with_fp8_mixed,msamp_o2",
    ),
}
_ABOUT = {
    "pretrain": (
        "Trains a language model at a level of the precision chart, validates it, and writes checkpoints and logs "
        "to outputs/DATE/TIME_LEVEL/."
    ),
    "audit": (
        "Trains two steps and prints, column by column, what the level declares in the chart beside what was found in "
        "the run. No checkpoint is written. Exit status: 0 where both agree, 1 where a column differs, 2 for bad input."
    ),
    "compare": (
        "Trains a model at several levels with several seeds, one after the other, and compares the losses, the speed "
        "and the memory: a table, and a page to open in a browser. Or compares runs that are there."
    ),
    "profile": (
        "Trains a few steps at a level, and the same model in BF16, and prints what GEMMs, quantization, attention, "
        "elementwise kernels, the optimizer and communication take, and how long the GPU waits for the host; the same "
        "for each kind of layer; and the layers that are better left in BF16. No checkpoint is written."
    ),
    "plan": (
        "Prints the bytes that each process holds and sends in a training step, by column. Makes no weights, reads no "
        "data, needs no GPU, and writes nothing."
    ),
    "advise": (
        "Prints, level by level, whether training fits the GPU and, on a GPU, the expected time of a step; the layers "
        "that FP8 would serve badly, by one batch of the data; and the line to paste. Trains nothing."
    ),
    "doctor": (
        "Prints the GPUs, the versions of the packages, and the backend of each level on this machine, or why a level "
        "does not run. With a model also the times of its GEMMs on this GPU, in half precision and in FP8 with "
        "quantization, and whether FP8 pays. Writes nothing."
    ),
}


def help_of(command: str) -> str:
    """The text of ``nemo-lowprec COMMAND --help``.

    Args:
        command: ``pretrain``, ``audit``, ``plan``, ``advise``, ``doctor``, ``compare`` or ``profile``.
    """
    left_out = {"pretrain": (), "compare": (*_OF_PRETRAIN, *_OF_ONE_RUN)}.get(command, _OF_PRETRAIN)
    groups = {group: ", ".join(choices_of(group)) for group in GROUPS if group not in left_out}
    settings = {s: about for s, about in _SETTINGS.items() if s not in left_out}
    settings |= _OWN.get(command, {})
    usage = f"nemo-lowprec {command} [GROUP=CHOICE ...] [SETTING=VALUE ...]"
    tables = {"groups and their choices": groups, "settings (a few)": settings}
    return help_page(usage, _ABOUT[command], tables, _EXAMPLES[command])
