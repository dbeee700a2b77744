"""Whether this package's Triton kernels compile for GPUs that are not at hand: ``python -m benchmarks.other_gpus``.

Needs Triton, and no GPU. Compiles each form of ``kernel_forms`` for each compute capability with the compiler and the
assembler that Triton brings. This shows errors of the compiler and too much shared memory before anybody's first step
on such a GPU; it shows no times, and no results.
"""

from __future__ import annotations

import re
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stdout
from functools import partial
from importlib import import_module
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.record import RESULTS, Record, arguments, read

CAPABILITIES = ("8.0", "8.6", "8.9", "9.0", "10.0", "12.0")
# KiB of shared memory that a block may have: CUDA C++ Programming Guide, technical specifications.
SHARED = {"8.0": 163, "8.6": 99, "8.9": 99, "9.0": 227, "10.0": 227, "12.0": 99}
_BY_FP16 = re.compile(r"cvt\.rz\.f16(x2)?\.f32")  # FP32 to FP16 on the way to FP8
_ASSEMBLER = re.compile(r"; error\s*: (.+)")


class Compiled(NamedTuple):
    """The result of one form.

    Attributes:
        error: the message of ``reason``; empty where the form compiled.
        shared: bytes of shared memory of a block.
        by_fp16: whether numbers go from FP32 through FP16 to FP8, which rounds twice.
    """

    error: str
    shared: int = 0
    by_fp16: bool = False


def compiled(form: dict[str, Any], capability: str) -> Compiled:
    """Compile a form of ``kernel_forms`` for a compute capability."""
    import triton
    import triton.language as tl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    def constant(value: Any) -> Any:
        if tl.dtype.is_dtype(value):
            return tl.dtype(value)
        return value["constexpr"] if isinstance(value, dict) else value

    kernel = getattr(import_module(form["module"]), form["kernel"])
    constants = dict(zip(map(tuple, form["constant_keys"]), map(constant, form["constant_vals"]), strict=True))
    attributes = dict(zip(map(tuple, form["attrs_keys"]), form["attrs_vals"], strict=True))
    source = ASTSource(kernel, form["signature"], constants, attributes)
    try:
        with redirect_stdout(StringIO()):  # where the assembler fails, Triton prints all of its input
            made = triton.compile(source, GPUTarget("cuda", int(capability.replace(".", "")), 32), form["options"])
    except Exception as error:  # of the compiler or the assembler
        return Compiled(reason(error))
    casts = "e4m3x2" in made.asm["ptx"]
    return Compiled("", made.metadata.shared, casts and bool(_BY_FP16.search(made.asm["ptx"])))


def reason(error: BaseException) -> str:
    """The message of the compiler or of the assembler, without places in the code."""
    while error.__cause__:  # the compiler names the place in the kernel around the error itself
        error = error.__cause__
    text = str(error).strip()
    assembler = _ASSEMBLER.search(text)
    return f"{type(error).__name__}: {assembler[1] if assembler else text.splitlines()[-1] if text else ''}"


def summary(capability: str, forms: list[dict[str, Any]], found: list[Compiled]) -> dict[str, Any]:
    """The figures of one compute capability."""
    errors = Counter(one.error for one in found if one.error)
    shared, kernel = max((one.shared, form["kernel"]) for form, one in zip(forms, found, strict=True))
    return {
        "capability": capability, "kernels": len({form["kernel"] for form in forms}), "forms": len(forms),
        "compiled": len(forms) - errors.total(), "errors": dict(errors.most_common(3)), "shared_bytes_max": shared,
        "shared_kernel": kernel, "over_shared": sum(one.shared > 1024 * SHARED[capability] for one in found),
        "by_fp16": sum(one.by_fp16 for one in found),
    }  # fmt: skip


def main() -> None:
    parser = arguments(__doc__.split("\n")[0], "other_gpus.jsonl")
    parser.add_argument("--forms", type=Path, default=RESULTS / "kernel_forms_h200.jsonl")
    parser.add_argument("--capabilities", nargs="+", choices=CAPABILITIES, default=CAPABILITIES)
    args = parser.parse_args()
    forms, record = read(args.forms)[1], Record(args.out)
    with ProcessPoolExecutor() as pool:
        for capability in args.capabilities:
            found = list(pool.map(partial(compiled, capability=capability), forms, chunksize=4))
            record.add(benchmark="other_gpus", **summary(capability, forms, found))


if __name__ == "__main__":
    main()
