"""Compiled CUDA kernels: their GPU architectures, and no spilled registers."""

import importlib.util
import os
import shutil
from pathlib import Path

import pytest

from tools.kernel_launches.cuda_sources import parse, spilling, stacks

ARCHITECTURES = {"sm_80", "sm_90a"}


def test_a_report_is_read_by_architecture_and_spills_are_found():
    report = """
Fatbin elf code:
arch = sm_80
 Function _Z5plainv:
  REG:32 STACK:0 SHARED:0
 Function _Z16max_norm_forwardv:
  REG:64 STACK:40 SHARED:0
Fatbin elf code:
arch = sm_90a
 Function _Z5plainv:
  REG:255 STACK:40 SHARED:0
 Function _Z16max_norm_forwardv:
  REG:255 STACK:48 SHARED:0
"""
    found = parse(report)
    assert found == {
        "sm_80": {"_Z5plainv": 0, "_Z16max_norm_forwardv": 40},
        "sm_90a": {"_Z5plainv": 40, "_Z16max_norm_forwardv": 48},
    }
    assert [spilling(kernels) for kernels in found.values()] == [{}, found["sm_90a"]]


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc, so no CUDA kernels")
def test_every_cuda_kernel_is_compiled_for_ampere_and_hopper_without_spills():
    module = importlib.util.find_spec("megalin._C")
    if module is None and os.environ.get("MEGALIN_CUDA") != "1":
        pytest.skip("megalin._C was left out of the installation; MEGALIN_CUDA=1 make install compiles it, as CI does")
    assert module is not None, "nvcc is installed, but megalin._C was not built: MEGALIN_CUDA=1 make install"
    found = stacks(Path(module.origin))
    assert set(found) == ARCHITECTURES
    assert all(found.values())
    assert [name for kernels in found.values() for name in spilling(kernels)] == []
