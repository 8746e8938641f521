"""Rank program of test_stragglers_gpu.py: torchrun -m tests.gpu.straggler_runs CONFIG FOLDER SLOW_RANK."""

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megalin.model.block import Block
from megalin.parallel.process_group import compute_device, process_group
from megalin.train.config import load_run_config
from megalin.train.loop import train

CYCLES = 20_000_000
"""Sleep of a slow rank's GPU in the forward of each block: about 10 ms. The other rank's steps take the 40 ms that its
host needs to launch them."""


def _slow_forward(block: Block, *args: Any) -> Any:
    torch.cuda._sleep(CYCLES)
    return _forward(block, *args)


_forward = Block.forward


def main() -> None:
    config, folder, slow_rank = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    device = compute_device()
    with process_group(device):
        if dist.get_rank() == slow_rank:
            Block.forward = _slow_forward  # type: ignore[method-assign]
        train(load_run_config(config, []), device, folder)


if __name__ == "__main__":
    main()
