"""States of runs of tokens under a fixed decay: a rank's 32,768 tokens, and segments of 128 with LRPE's wide keys."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.case import Case, Function, Work
from megalin.ops.scans.states import decay_state, decay_state_reference

HEADS, VALUE = 16, 128


def cases() -> Iterator[Case]:
    """Context parallelism's and LRPE's, bf16, 16 heads."""
    yield _case(1, 32768, 128)
    yield _case(256, 128, 128)
    yield _case(256, 128, 256)


def _case(batch: int, length: int, key: int) -> Case:
    k, v = (torch.randn(batch, length, HEADS, width, device="cuda", dtype=torch.bfloat16) for width in (key, VALUE))
    slopes = torch.rand(HEADS, device="cuda") / 8.0

    def apply(op: Function) -> Function:
        return lambda k, v: [op(k, v, slopes)]

    tokens, states = k.nbytes + v.nbytes, 4 * batch * HEADS * key * VALUE
    products = 2 * batch * length * HEADS * key * VALUE
    return Case(
        op="decay_state",
        shape=f"{batch}x{length}x{HEADS}x{key}x{VALUE} bf16",
        inputs={"k": k, "v": v},
        checked={"k": k[:2, :4096], "v": v[:2, :4096]},
        reference=apply(decay_state_reference),
        ours={"auto": apply(decay_state)},
        peers={},
        bytes=Work(tokens + states, 2 * tokens + states),
        flops=Work(products, 2 * products),
    )
