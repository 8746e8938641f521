"""Tied gates of HGRN2-1B from a slice of its projection, 32,768 tokens."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from benchmarks.case import BenchmarkCase, BenchmarkFunction, BenchmarkWork
from megalin.ops.gates.forget_gates import forget_gates, forget_gates_reference

ROWS, WIDTH, CHECKED = 32768, 1536, 1000


def cases() -> Iterator[BenchmarkCase]:
    """One case, bf16."""
    projection = torch.randn(ROWS, 3 * WIDTH, device="cuda", dtype=torch.bfloat16)
    bound = torch.rand(WIDTH, device="cuda")

    def apply(op: BenchmarkFunction) -> BenchmarkFunction:
        def run(projection: Tensor, bound: Tensor) -> list[Tensor]:
            return list(op(projection[:, WIDTH : 2 * WIDTH], bound))

        return run

    read = projection.nbytes // 3
    yield BenchmarkCase(
        op="forget_gates",
        shape=f"{ROWS}x{WIDTH} bf16",
        inputs={"projection": projection, "bound": bound},
        checked={"projection": projection[:CHECKED], "bound": bound},
        reference=apply(forget_gates_reference),
        ours={"auto": apply(forget_gates)},
        baselines={},
        # The decay is fp32; the gradient covers the full projection, two thirds of it zero.
        bytes=BenchmarkWork(4 * read, 7 * read),
        flops=BenchmarkWork(0, 0),
    )
