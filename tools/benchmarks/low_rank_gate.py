"""Input gate of rank 32 of Rodimus-1.3B on a slice of a projection."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from benchmarks.case import BenchmarkCase, BenchmarkFunction, BenchmarkWork
from megalin.ops.gates.low_rank_gate import low_rank_gate, low_rank_gate_reference

ROWS, WIDTH, RANK, CHECKED = 32768, 4096, 32, 1000


def cases() -> Iterator[BenchmarkCase]:
    """One case, bf16."""
    inputs = {
        "projection": torch.randn(ROWS, 2 * WIDTH, device="cuda", dtype=torch.bfloat16),
        "code": torch.randn(ROWS, RANK, device="cuda", dtype=torch.bfloat16),
    }
    columns = {
        "weight": RANK**-0.5 * torch.randn(WIDTH, RANK, device="cuda", dtype=torch.bfloat16),
        "bias": torch.randn(WIDTH, device="cuda", dtype=torch.bfloat16),
    }

    def apply(op: BenchmarkFunction) -> BenchmarkFunction:
        def run(projection: Tensor, code: Tensor, weight: Tensor, bias: Tensor) -> list[Tensor]:
            return [op(projection[:, :WIDTH], code, weight, bias)]

        return run

    read = inputs["projection"].nbytes // 2
    yield BenchmarkCase(
        op="low_rank_gate",
        shape=f"{ROWS}x{WIDTH} rank {RANK} bf16",
        inputs=inputs | columns,
        checked={name: x[:CHECKED] for name, x in inputs.items()} | columns,
        reference=apply(low_rank_gate_reference),
        ours={"auto": apply(low_rank_gate)},
        baselines={},
        # The gradient covers the full projection: half of it is zero.
        bytes=BenchmarkWork(2 * read, 4 * read),
        flops=BenchmarkWork(2 * ROWS * WIDTH * RANK, 6 * ROWS * WIDTH * RANK),
    )
