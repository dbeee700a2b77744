"""The command ``nemo-lowprec`` and its subcommands.

A mistake in the input, or a machine that cannot run the command, is one sentence on stderr and exit status 2; an audit
that differs from the chart is one sentence and exit status 1.
``NEMO_LOWPREC_TRACEBACK=1`` shows the traceback of the error. To add a subcommand, write a function that takes the rest
of the command line and list the function in ``_COMMANDS``.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import NoReturn

from nemo_lowprec.extras import needs_extras
from nemo_lowprec.quiet import quiet

# Imports are inside the functions: a command answers --help and mistakes before it loads torch.

_DESCRIPTION = "Low-precision training for PyTorch Lightning and NeMo."


def _pretrain(arguments: Sequence[str]) -> None:
    """train a language model; takes Hydra overrides such as precision=fp16_mixed trainer.max_steps=400"""
    _hydra("pretrain", arguments)


def _run(arguments: Sequence[str]) -> None:
    """train through nemo_run; takes a recipe and settings: --factory tiny trainer.plugins=fp16_mixed"""
    from nemo_lowprec.run_arguments import check_run_arguments, run_help

    if {"-h", "--help"} & set(arguments):
        print(run_help())
        return
    check_run_arguments(arguments)
    from nemo_lowprec.recipes.__main__ import main as run_recipe

    run_recipe(arguments)


def _prepare_data(arguments: Sequence[str]) -> None:
    """build a tokenizer and Megatron's .bin/.idx files from text"""
    parser = argparse.ArgumentParser("nemo-lowprec prepare-data", description=_prepare_data.__doc__)
    parser.add_argument("--out", required=True, help="folder to write; a new or an empty one")
    parser.add_argument(
        "--source", help="folder of text or .jsonl files, or one .jsonl file (default: the standard library's sources)"
    )
    parser.add_argument("--vocab-size", type=int, help="ids of the tokenizer (default: 8192)")
    parser.add_argument("--validation-fraction", type=float, help="part of the files kept apart (default: 0.02)")
    parser.add_argument("--max-bytes", type=int, help="take only so much of the source (default: all)")
    parser.add_argument("--seed", type=int, help="of the split (default: 0)")
    parser.add_argument("--text-field", help="key of the text in .jsonl lines (default: text)")
    options = vars(parser.parse_args(arguments))
    _check_exists(options["source"])

    from nemo_lowprec.data import prepare_data
    from nemo_lowprec.lines import pair_lines

    data = prepare_data(options.pop("out"), **options)
    pairs = [("Folder", str(data.path)), ("Vocabulary", f"{data.vocab_size:,} ids")]
    pairs += [(split.capitalize(), f"{tokens:,} tokens") for split, tokens in data.tokens.items()]
    print("\n".join(["Prepared", *pair_lines(pairs)]))


def _export(arguments: Sequence[str]) -> None:
    """write a checkpoint's weights as safetensors that transformers loads"""
    parser = argparse.ArgumentParser("nemo-lowprec export", description=_export.__doc__)
    parser.add_argument("checkpoint", help="a .ckpt file, or a folder that lowprec_sharded wrote")
    parser.add_argument("out", help="folder to write; a new or an empty one")
    parser.add_argument(
        "--dtype", default="bf16", choices=["bf16", "fp16", "fp32"], help="of the weights (default: %(default)s)"
    )
    parser.add_argument("--tokenizer", help="tokenizer.json or its folder, such as prepare-data's, to go with them")
    options = vars(parser.parse_args(arguments))
    _check_exists(options["checkpoint"])
    _check_exists(options["tokenizer"])

    from nemo_lowprec.models import export_checkpoint

    export_checkpoint(**options).print_table()


def _audit(arguments: Sequence[str]) -> None:
    """train two steps and print what a level declares beside what is found; takes Hydra overrides"""
    _hydra("audit", arguments)


def _plan(arguments: Sequence[str]) -> None:
    """print bytes of a process and traffic of a step, without training; takes Hydra overrides, nodes=8 gpus=8"""
    _hydra("plan", arguments)


def _inspect(arguments: Sequence[str]) -> None:
    """print a checkpoint's level, formats, bytes by column and amax histories"""
    parser = argparse.ArgumentParser("nemo-lowprec inspect", description=_inspect.__doc__)
    parser.add_argument("checkpoint", help="a .ckpt file, or a folder that lowprec_sharded or lowprec_megatron wrote")
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--all", action="store_true", help="a row of the heatmap for every layer")
    output.add_argument("--json", action="store_true", help="one line of JSON, with all amaxes")
    options = parser.parse_args(arguments)

    from rich.console import Console

    from nemo_lowprec.report.inspection import inspect_checkpoint

    found = inspect_checkpoint(options.checkpoint)
    if options.json:
        print(json.dumps(found.to_json()))
    else:
        Console().print(found.table(options.all))


def _doctor(arguments: Sequence[str]) -> None:
    """print GPU, versions and what each level runs on here; with model=llama_100m whether FP8 pays"""
    if set(arguments) - {"--json"}:
        _hydra("doctor", arguments)
        return

    from rich.console import Console

    from nemo_lowprec.report.doctor import examine

    with redirect_stdout(sys.stderr):  # Megatron-core prints while it is imported
        found = examine()
    if arguments:
        print(json.dumps(found.to_json()))
    else:
        Console().print(found.table())


def _report(arguments: Sequence[str]) -> None:
    """write a page about a monitored run: loss, layers, memory, what the level declares and what was found"""
    parser = argparse.ArgumentParser("nemo-lowprec report", description=_report.__doc__)
    parser.add_argument("run_dir", help="folder of a run with monitor=True, in which monitor.jsonl is")
    parser.add_argument("--out", help="HTML file to write (default: report.html in the folder)")
    options = parser.parse_args(arguments)
    _check_exists(options.run_dir)

    from nemo_lowprec.report.page.run_page import write_report

    print(write_report(options.run_dir, options.out))


def _compare(arguments: Sequence[str]) -> None:
    """compare levels: train a model at each, precision=bf16_mixed,msamp_o2 seeds=3, or take run folders RUN1 RUN2"""
    if {"-h", "--help"} & set(arguments):
        from nemo_lowprec.conf.help import help_of

        print(help_of("compare"))
        return
    from nemo_lowprec.conf.compare_line import CompareLine

    line = CompareLine.of(arguments)
    from nemo_lowprec.conf.compare_job import compare_job

    compare_job(line)


def _advise(arguments: Sequence[str]) -> None:
    """print which level fits, expected times, layers to keep back; takes Hydra overrides, or a monitored run"""
    if len(arguments) == 1 and Path(arguments[0]).exists():
        from nemo_lowprec.report.advice.of_run import advise_run

        print("\n".join(advise_run(arguments[0]).lines()))
        return
    _hydra("advise", arguments)


def _profile(arguments: Sequence[str]) -> None:
    """measure where the time of a step goes, layer by layer, beside the same model in BF16; takes Hydra overrides"""
    if {"-h", "--help"} & set(arguments) or any(word.startswith("into=") for word in arguments):
        _hydra("profile", arguments)
        return
    from nemo_lowprec.conf.profile_line import ProfileLine

    line = ProfileLine.of(arguments)
    from nemo_lowprec.conf.profile_both import profile_both

    profile_both(line)


def _hydra(command: str, arguments: Sequence[str]) -> None:
    if {"-h", "--help"} & set(arguments):
        from nemo_lowprec.conf.help import help_of

        print(help_of(command))
        return
    from nemo_lowprec.conf.app import run_job

    run_job(command, arguments)


def _migrate(arguments: Sequence[str]) -> None:
    """rewrite scripts for Lightning's Transformer Engine, Accelerate's FP8 or MS-AMP; prints a diff"""
    parser = argparse.ArgumentParser("nemo-lowprec migrate", description=_migrate.__doc__)
    parser.add_argument("scripts", nargs="+", help="Python files")
    parser.add_argument("--write", action="store_true", help="rewrite the files in the place of printing a diff")
    options = parser.parse_args(arguments)

    from nemo_lowprec.migrate.command import migrate

    migrate(options.scripts, options.write)


def _levels(arguments: Sequence[str]) -> None:
    """print the precision chart"""
    argparse.ArgumentParser("nemo-lowprec levels", description=_levels.__doc__).parse_args(arguments)

    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    from nemo_lowprec.chart import ALIASES, CHART

    # 80 columns: the longest name has 38 letters.
    headings = ("\nLevel", "\nGEMM", "\nComm", "\nWeight", "Master\nweight", "Weight\ngrad", "Optimizer\nstates")
    table = Table(*headings, title="Precision levels", box=SIMPLE_HEAD, show_edge=False, padding=0)
    table.caption = "*: FP8 with fp8_params=True"
    for level in CHART.values():
        table.add_row(*(cell.replace(", FP8 with fp8_params", "*") for cell in level.columns().values()))
    console = Console()
    console.print(table)
    console.print(f"Megatron-Bridge's names of levels with arguments: {', '.join(ALIASES)}")


def _check_exists(path: str | None) -> None:
    if path is not None and not Path(path).exists():
        raise ValueError(f"{path} does not exist.")


_COMMANDS: dict[str, Callable[[Sequence[str]], None]] = {
    command.__name__[1:].replace("_", "-"): command
    for command in (
        _pretrain,
        _run,
        _prepare_data,
        _audit,
        _plan,
        _advise,
        _report,
        _compare,
        _profile,
        _inspect,
        _doctor,
        _export,
        _migrate,
        _levels,
    )
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command line and returns its exit status.

    Args:
        arguments: without the program's name; None: the process' own.
    """
    parser = argparse.ArgumentParser("nemo-lowprec", description=_DESCRIPTION)
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version, and those of what it needs")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, command in _COMMANDS.items():
        # A subcommand reads its own --help, because Hydra and nemo_run have a --help, too.
        commands.add_parser(name, help=command.__doc__, add_help=False, prefix_chars="\0")
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    # argparse reads the first word only: the other words may be Hydra overrides, which argparse must not interpret.
    chosen = parser.parse_args(arguments[:1]).command
    try:
        with quiet(), needs_extras("This command"):
            _COMMANDS[chosen](arguments[1:])
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        status = getattr(error, "exit_status", 2 if _is_bad_input(error) else None)
        if os.environ.get("NEMO_LOWPREC_TRACEBACK") or status is None:
            raise
        print(f"nemo-lowprec {chosen}: {error}", file=sys.stderr)
        return int(status)
    return 0


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        from importlib.metadata import PackageNotFoundError, version

        names = ("nemo-lowprec", "torch", "lightning", "transformers", "transformer-engine", "megatron-core")
        for name in names:
            try:
                print(name, version(name))
            except PackageNotFoundError:
                print(name, "not installed")
        parser.exit()


def _is_bad_input(error: Exception) -> bool:
    """Whether an exception is a sentence about the input or the machine, from this package or from Lightning's Trainer.

    An exception that torch raises is a defect, and its traceback is shown.
    """
    if type(error).__name__ == "MisconfigurationException":
        return True
    if not isinstance(error, ValueError | TypeError | RuntimeError):
        return False
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and Path(frames[-1].filename).is_relative_to(Path(__file__).parent)


if __name__ == "__main__":
    sys.exit(main())
