"""Rotary positions of queries or keys, 32,768 tokens, 12 heads of 128."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from benchmarks.case import BenchmarkCase, BenchmarkWork
from megalin.ops.positions.encodings import rope, rope_reference

BATCH, LENGTH, HEADS, KEY, CHECKED = 4, 8192, 12, 128, 1000


def cases() -> Iterator[BenchmarkCase]:
    """LLaMA-1B's queries, bf16."""
    x = torch.randn(BATCH, LENGTH, HEADS, KEY, device="cuda", dtype=torch.bfloat16)
    positions = torch.arange(LENGTH, device="cuda")

    def ours(x: Tensor, positions: Tensor) -> list[Tensor]:
        return [rope(x, positions)]

    def reference(x: Tensor, positions: Tensor) -> list[Tensor]:
        return [rope_reference(x, positions)]

    yield BenchmarkCase(
        op="rope",
        shape=f"{BATCH}x{LENGTH}x{HEADS}x{KEY} bf16",
        inputs={"x": x, "positions": positions},
        checked={"x": x[:, :CHECKED], "positions": positions[:CHECKED]},
        reference=reference,
        ours={"auto": ours},
        baselines={},
        bytes=BenchmarkWork(2 * x.nbytes, 2 * x.nbytes),
        flops=BenchmarkWork(0, 0),
    )
