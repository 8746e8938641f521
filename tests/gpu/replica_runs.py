"""Rank program of test_replicas_gpu.py: `megalin`, with a bit of a weight of rank 1 that flips after step 3."""

from typing import Any

import torch
import torch.distributed as dist

from megalin.__main__ import run
from megalin.parallel.tensor_parallel import local
from megalin.train.engine import FullyShardedEngine

FLIP_STEP = 3

_step = FullyShardedEngine.step


def _step_and_flip(engine: FullyShardedEngine, *args: Any, **options: Any) -> Any:
    launched = _step(engine, *args, **options)
    if options["step"] == FLIP_STEP and dist.get_rank() == 1:
        with torch.no_grad():
            local(next(iter(engine.model.parameters()))).view(torch.int32).view(-1)[5] ^= 1 << 12
    return launched


if __name__ == "__main__":
    FullyShardedEngine.step = _step_and_flip  # type: ignore[method-assign]
    run()
