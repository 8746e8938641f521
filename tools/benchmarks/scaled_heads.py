"""Mamba-2-1B's values times their time steps: 64 heads of 64."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from benchmarks.case import Case, Function, Work
from megalin.ops.gates.scaled_heads import scaled_heads, scaled_heads_reference

ROWS, HEADS, WIDTH, CHECKED = 32768, 64, 64, 1000


def cases() -> Iterator[Case]:
    """bf16."""
    inputs = {
        "x": torch.randn(ROWS, HEADS, WIDTH, device="cuda", dtype=torch.bfloat16),
        "factor": torch.rand(ROWS, HEADS, device="cuda"),
    }

    def apply(op: Function) -> Function:
        def run(x: Tensor, factor: Tensor) -> list[Tensor]:
            return [op(x, factor)]

        return run

    whole, numbers = inputs["x"].nbytes, inputs["factor"].nbytes
    yield Case(
        op="scaled_heads",
        shape=f"{ROWS}x{HEADS}x{WIDTH} bf16",
        inputs=inputs,
        checked={name: x[:CHECKED] for name, x in inputs.items()},
        reference=apply(scaled_heads_reference),
        ours={"auto": apply(scaled_heads)},
        peers={},
        bytes=Work(2 * whole + numbers, 3 * whole + 2 * numbers),
        flops=Work(ROWS * HEADS * WIDTH, 3 * ROWS * HEADS * WIDTH),
    )
