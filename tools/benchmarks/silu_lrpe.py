"""SiLU and LRPE of queries and keys, 32,768 tokens, 16 heads of 128, parts of one projection."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from benchmarks.case import BenchmarkCase, BenchmarkFunction, BenchmarkWork
from megalin.ops.choices import LRPEForm
from megalin.ops.positions.silu_lrpe import silu_lrpe, silu_lrpe_reference

BATCH, LENGTH, HEADS, KEY, CHECKED = 4, 8192, 16, 128, 1000


def cases() -> Iterator[BenchmarkCase]:
    """SiLU alone in a projection with values and a gate, then both LRPE forms in one with values; bf16."""
    yield _case(None, parts=4)
    yield _case("cosine", parts=3)
    yield _case("rotation", parts=3)


def _case(form: LRPEForm | None, *, parts: int) -> BenchmarkCase:
    projection = torch.randn(BATCH, LENGTH, parts, HEADS, KEY, device="cuda", dtype=torch.bfloat16)
    positions = torch.arange(LENGTH, device="cuda")
    inputs = {"projection": projection, "positions": positions}
    if form is not None:
        inputs["theta"] = 10000.0 ** -torch.rand(HEADS, KEY if form == "cosine" else KEY // 2, device="cuda")

    def apply(op: BenchmarkFunction) -> BenchmarkFunction:
        def run(projection: Tensor, positions: Tensor, theta: Tensor | None = None) -> list[Tensor]:
            return list(op(projection, theta, positions, form=form))

        return run

    part = projection.nbytes // parts
    encoded = part * (4 if form == "cosine" else 2)
    return BenchmarkCase(
        op="silu_lrpe",
        shape=f"{form or 'silu'} {BATCH}x{LENGTH}x{parts}x{HEADS}x{KEY} bf16",
        inputs=inputs,
        checked=inputs | {"projection": projection[:2, :CHECKED], "positions": positions[:CHECKED]},
        reference=apply(silu_lrpe_reference),
        ours={"auto": apply(silu_lrpe)},
        baselines={},
        # Backward: q, k, the gradients of their encodings and of the other parts, and the projection's.
        bytes=BenchmarkWork(2 * part + encoded, 2 * part + encoded + (parts - 2) * part + projection.nbytes),
        flops=BenchmarkWork(0, 0),
    )
