"""Skip, gate and sums of squares at Rodimus-1.3B's and Mamba-2's inner width, the gate a slice of a projection."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from benchmarks.case import BenchmarkCase, BenchmarkFunction, BenchmarkWork
from megalin.ops.norms.skip_gated_squares import skip_gated_squares, skip_gated_squares_reference

ROWS, WIDTH, CHECKED = 32768, 4096, 1000


def cases() -> Iterator[BenchmarkCase]:
    """One case, bf16."""
    inputs = {name: torch.randn(ROWS, WIDTH, device="cuda", dtype=torch.bfloat16) for name in ("x", "skip")}
    inputs["projection"] = torch.randn(ROWS, 2 * WIDTH, device="cuda", dtype=torch.bfloat16)
    columns = {"factor": torch.randn(WIDTH, device="cuda"), "weight": torch.randn(WIDTH, device="cuda").bfloat16()}

    def apply(op: BenchmarkFunction) -> BenchmarkFunction:
        def run(x: Tensor, skip: Tensor, projection: Tensor, factor: Tensor, weight: Tensor) -> list[Tensor]:
            return list(op(x, skip, factor, projection[:, WIDTH:], weight))

        return run

    read = inputs["x"].nbytes
    yield BenchmarkCase(
        op="skip_gated_squares",
        shape=f"{ROWS}x{WIDTH} bf16",
        inputs=inputs | columns,
        checked={name: x[:CHECKED] for name, x in inputs.items()} | columns,
        reference=apply(skip_gated_squares_reference),
        ours={"auto": apply(skip_gated_squares)},
        baselines={},
        # The gradient covers the full projection: half of it is zero.
        bytes=BenchmarkWork(4 * read, 8 * read),
        flops=BenchmarkWork(0, 0),
    )
