"""Final states under a fixed decay: a rank's 32,768 tokens, and segments of 128 tokens with LRPE's wide keys."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.case import BenchmarkCase, BenchmarkFunction, BenchmarkWork
from megalin.ops.scans.states import decay_state, decay_state_reference

HEADS, VALUE = 16, 128


def cases() -> Iterator[BenchmarkCase]:
    """Sizes of context parallelism and of LRPE, bf16, 16 heads."""
    yield _case(1, 32768, 128)
    yield _case(256, 128, 128)
    yield _case(256, 128, 256)


def _case(batch: int, length: int, key: int) -> BenchmarkCase:
    k, v = (torch.randn(batch, length, HEADS, width, device="cuda", dtype=torch.bfloat16) for width in (key, VALUE))
    slopes = torch.rand(HEADS, device="cuda") / 8.0

    def apply(op: BenchmarkFunction) -> BenchmarkFunction:
        return lambda k, v: [op(k, v, slopes)]

    tokens, states = k.nbytes + v.nbytes, 4 * batch * HEADS * key * VALUE
    flops = 2 * batch * length * HEADS * key * VALUE
    return BenchmarkCase(
        op="decay_state",
        shape=f"{batch}x{length}x{HEADS}x{key}x{VALUE} bf16",
        inputs={"k": k, "v": v},
        checked={"k": k[:2, :4096], "v": v[:2, :4096]},
        reference=apply(decay_state_reference),
        ours={"auto": apply(decay_state)},
        baselines={},
        bytes=BenchmarkWork(tokens + states, 2 * tokens + states),
        flops=BenchmarkWork(flops, 2 * flops),
    )
