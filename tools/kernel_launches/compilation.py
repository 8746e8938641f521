"""Compilation of launches for a chip without a GPU, and the limits on shared memory and spills."""

from __future__ import annotations

import ast
import re
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.errors import TritonError

from megalin._triton.dispatch.chips import SHARED_BYTES

from .launch import CHIPS, OPTIONS, KernelLaunch, kernel_of

SHARED_LIMIT = {chip: SHARED_BYTES[divmod(chip, 10)] for chip in CHIPS}
"""Largest shared memory of a thread block in bytes, by chip."""
SPILL_LIMIT = 16
"""Bytes of stack a thread that need no mention in the list: above them a kernel spills more than a pointer or two."""
DTYPES = {"bf16": tl.bfloat16, "fp16": tl.float16, "fp32": tl.float32, "fp64": tl.float64}


class Compilation(NamedTuple):
    """Resources of a launch on a chip, or the reason why it has none."""

    error: str
    """Empty where the launch compiles."""
    shared: int
    """Bytes of shared memory a thread block."""
    stack: int
    """Bytes of stack a thread: spilled registers."""
    ptx: str

    def problem(self, chip: int, spills: Mapping[int, int]) -> str:
        """Why the launch fails on `chip`; empty where it does not.

        Args:
            spills: the known bytes of stack a thread, by chip.
        """
        if self.error:
            return self.error
        if self.shared > SHARED_LIMIT[chip]:
            return f"{self.shared:,} bytes of shared memory; sm_{chip} has {SHARED_LIMIT[chip]:,}"
        limit = spills.get(chip, SPILL_LIMIT)
        return f"spills: {self.stack} bytes of stack a thread, above {limit}" if self.stack > limit else ""


def compile_launch(launch: KernelLaunch, chip: int) -> Compilation:
    """Compiles a launch for a chip."""
    try:
        compiled = triton.compile(_source(launch), target=GPUTarget("cuda", chip, 32), options=_options(launch))
    except (RuntimeError, TritonError) as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        return Compilation(f"{type(error).__name__}: {lines[-1] if lines else ''}"[:300], 0, 0, "")
    return Compilation("", compiled.metadata.shared, _stack(compiled.asm["cubin"]), compiled.asm["ptx"])


def _source(launch: KernelLaunch) -> ASTSource:
    kernel = kernel_of(launch)
    values = dict(word.split("=", 1) for word in launch.text.split())
    constants = {parameter.name for parameter in kernel.params if parameter.is_constexpr}
    types: dict[str, str] = {}
    known: dict[tuple[int], object] = {}
    hints: dict[tuple[int], list[list[object]]] = {}
    for index, name in enumerate(kernel.arg_names):
        kind, _, aligned = values[name].partition("/")
        is_type = name not in constants and not re.fullmatch(r"None|True|False|-?\d+", kind)
        types[name] = re.sub(r",(?=\d)", ", ", kind) if is_type else "constexpr"
        if not is_type:
            known[(index,)] = DTYPES[kind] if kind in DTYPES else ast.literal_eval(kind)
        elif aligned:
            hints[(index,)] = [["tt.divisibility", int(aligned)]]
    return ASTSource(fn=kernel, signature=types, constexprs=known, attrs=hints)


def _options(launch: KernelLaunch) -> dict[str, object]:
    values = dict(word.split("=", 1) for word in launch.text.split())
    return {name: ast.literal_eval(values[name]) for name in OPTIONS if name in values}


def _stack(cubin: bytes) -> int:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        report = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    found = re.search(r"STACK:(\d+)", report.stdout)
    assert found is not None, report.stdout
    return int(found[1])
