"""Values of Mamba-2-1B times their time steps: 64 heads of 64."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from benchmarks.case import BenchmarkCase, BenchmarkFunction, BenchmarkWork
from megalin.ops.gates.scaled_heads import scaled_heads, scaled_heads_reference

ROWS, HEADS, WIDTH, CHECKED = 32768, 64, 64, 1000


def cases() -> Iterator[BenchmarkCase]:
    """One case, bf16."""
    inputs = {
        "x": torch.randn(ROWS, HEADS, WIDTH, device="cuda", dtype=torch.bfloat16),
        "factor": torch.rand(ROWS, HEADS, device="cuda"),
    }

    def apply(op: BenchmarkFunction) -> BenchmarkFunction:
        def run(x: Tensor, factor: Tensor) -> list[Tensor]:
            return [op(x, factor)]

        return run

    values, factors = inputs["x"].nbytes, inputs["factor"].nbytes
    yield BenchmarkCase(
        op="scaled_heads",
        shape=f"{ROWS}x{HEADS}x{WIDTH} bf16",
        inputs=inputs,
        checked={name: x[:CHECKED] for name, x in inputs.items()},
        reference=apply(scaled_heads_reference),
        ours={"auto": apply(scaled_heads)},
        baselines={},
        bytes=BenchmarkWork(2 * values + factors, 3 * values + 2 * factors),
        flops=BenchmarkWork(ROWS * HEADS * WIDTH, 3 * ROWS * HEADS * WIDTH),
    )
