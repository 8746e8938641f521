"""Compilation of csrc/cuda for a chip without a GPU, and the spilled registers of its kernels."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import triton

from .compilation import SPILL_LIMIT

FOLDER = Path(__file__).parents[2] / "csrc/cuda"
SPILLS = {"max_norm_forward": 40, "gate_reverse": 184}
"""Known bytes of stack a thread with nvcc 13.0, by name: encoded rows of 16,384 on sm_80; HGRN2's gradients on sm_90a,
whose state, gradients and operands take all 255 registers."""


def sources() -> list[Path]:
    """The .cu files."""
    return sorted(FOLDER.glob("*.cu"))


def problem_of(source: Path, chip: int) -> str:
    """Why a .cu file fails on a chip; empty where it compiles without unknown spills."""
    if shutil.which("nvcc") is None:
        return "nvcc is not on the path"
    architecture = "90a" if chip == 90 else str(chip)  # wgmma and its registers need the "a"
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "kernel.cubin"
        options = ["-std=c++17", "-O3", "-Werror=all-warnings", f"-arch=sm_{architecture}", "-cubin", "-o", target]
        result = subprocess.run(["nvcc", *options, source], capture_output=True, text=True, check=False)
        if result.returncode != 0:
            lines = [line for line in result.stderr.splitlines() if "error" in line] or result.stderr.splitlines()[-1:]
            return " ".join(lines)[:300]
        found = stacks(target)
    bad = {name: stack for kernels in found.values() for name, stack in spilling(kernels).items()}
    return f"spills: bytes of stack a thread {bad}" if bad else ""


def stacks(library: Path) -> dict[str, dict[str, int]]:
    """Architecture -> kernel -> bytes of stack a thread, for every kernel with machine code in a library or cubin."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    report = subprocess.run([tool, "--dump-resource-usage", library], capture_output=True, text=True, check=True).stdout
    return parse(report)


def parse(report: str) -> dict[str, dict[str, int]]:
    """`stacks` from the text that cuobjdump prints."""
    found: dict[str, dict[str, int]] = {}
    architecture = name = ""
    for line in report.splitlines():
        if match := re.search(r"arch = (\w+)", line):
            architecture = match[1]
        elif match := re.search(r"Function (\w+):", line):
            name = match[1]
        elif match := re.search(r"REG:\d+ STACK:(\d+)", line):
            found.setdefault(architecture, {})[name] = int(match[1])
    return found


def spilling(kernels: dict[str, int]) -> dict[str, int]:
    """Kernels above their limit, with their bytes of stack."""
    known = {name: next((SPILLS[key] for key in SPILLS if key in name), SPILL_LIMIT) for name in kernels}
    return {name: stack for name, stack in kernels.items() if stack > known[name]}
