"""States passed between segments under LRPE: 4 x 64 segments of 128 tokens, 16 heads."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from benchmarks.case import BenchmarkCase, BenchmarkWork
from megalin.ops.choices import LRPEForm
from megalin.ops.dispatch.backend import Backend
from megalin.ops.positions.lrpe_states import enter_segments

BATCH, SEGMENTS, LENGTH, HEADS, VALUE = 4, 64, 128, 16, 128


def cases() -> Iterator[BenchmarkCase]:
    """Both forms, heads of 128, fp32."""
    yield _case("cosine", 256)
    yield _case("rotation", 128)


def _case(form: LRPEForm, key: int) -> BenchmarkCase:
    added = torch.randn(BATCH, SEGMENTS, HEADS, key, VALUE, device="cuda")
    theta = 10000.0 ** -torch.rand(HEADS, key // 2, device="cuda")
    slopes = torch.rand(HEADS, device="cuda") / 8.0

    def run(added: Tensor, theta: Tensor, backend: Backend = "auto") -> list[Tensor]:
        return list(enter_segments(added, theta, slopes.to(added.dtype), form=form, length=LENGTH, backend=backend))

    def reference(added: Tensor, theta: Tensor) -> list[Tensor]:
        return run(added, theta, "reference")

    inputs = {"added": added, "theta": theta}
    return BenchmarkCase(
        op="lrpe_states",
        shape=f"{form} {BATCH}x{SEGMENTS}x{HEADS}x{key}x{VALUE} fp32",
        inputs=inputs,
        checked=inputs | {"added": added[:1, :8]},
        reference=reference,
        ours={"auto": run},
        baselines={},
        # Backward: the gradients of the entering states, these states, and the gradients of the added ones.
        bytes=BenchmarkWork(2 * added.nbytes, 3 * added.nbytes),
        flops=BenchmarkWork(0, 0),
        compiled=False,
    )
