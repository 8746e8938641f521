"""SiLU and LRPE of queries and keys, 32,768 tokens, 16 heads of 128, as slices of one projection."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from benchmarks.case import Case, Function, Work
from megalin.ops.silu_lrpe import LRPEForm, silu_lrpe, silu_lrpe_reference

BATCH, LENGTH, HEADS, KEY, CHECKED = 4, 8192, 16, 128, 1000


def cases() -> Iterator[Case]:
    """Both forms, bf16."""
    for form in ("cosine", "rotation"):
        yield _case(form)


def _case(form: LRPEForm) -> Case:
    projection = torch.randn(BATCH, LENGTH, 3 * HEADS * KEY, device="cuda", dtype=torch.bfloat16)
    theta = 10000.0 ** -torch.rand(HEADS, KEY if form == "cosine" else KEY // 2, device="cuda")
    positions = torch.arange(LENGTH, device="cuda")

    def apply(op: Function) -> Function:
        def run(projection: Tensor, theta: Tensor, positions: Tensor) -> list[Tensor]:
            q, k, _ = projection.unflatten(-1, (3, HEADS, KEY)).unbind(-3)
            return list(op(q, k, theta, positions, form=form))

        return run

    read = projection.nbytes * 2 // 3
    written = read * (2 if form == "cosine" else 1)
    return Case(
        op="silu_lrpe",
        shape=f"{form} {BATCH}x{LENGTH}x{HEADS}x{KEY} bf16",
        inputs={"projection": projection, "theta": theta, "positions": positions},
        checked={"projection": projection[:2, :CHECKED], "theta": theta, "positions": positions[:CHECKED]},
        reference=apply(silu_lrpe_reference),
        ours={"auto": apply(silu_lrpe)},
        peers={},
        # The gradient of the projection is whole: a third of it, that of the values, is zero.
        bytes=Work(read + written, read + written + projection.nbytes),
        flops=Work(0, 0),
    )
