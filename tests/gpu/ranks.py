"""Ranks on GPUs of this host: one GPU each, or all on one if there are too few and NCCL_MULTI_RANK_GPU_ENABLE is 1."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megalin.parallel.process_group import SHARED_GPUS


def _missing(count: int) -> bool:
    return torch.cuda.device_count() < count


def needs_gpus(count: int) -> pytest.MarkDecorator:
    """Skips a test if there are fewer than `count` GPUs and ranks may not share one."""
    skipped = _missing(count) and os.environ.get(SHARED_GPUS) != "1"
    return pytest.mark.skipif(skipped, reason=f"needs {count} GPUs, or {SHARED_GPUS}=1 and NCCL 2.30")


def on_gpus(count: int, module: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Runs `python -m module` on `count` ranks and returns its exit status and output."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
    environment = dict(os.environ)
    if _missing(count):
        # A rank uses the only GPU that is visible to it; torch's symmetric memory refuses a shared GPU by default.
        environment |= {"CUDA_VISIBLE_DEVICES": "0", "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"}
    command = [*launcher, "-m", module, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, env=environment)
