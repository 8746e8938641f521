"""Elementwise product in a gated linear unit, 32,768 tokens, both factors in one projection."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from benchmarks.case import BenchmarkCase, BenchmarkFunction, BenchmarkWork
from megalin.ops.choices import Activation
from megalin.ops.gates.gated_product import gated_product, gated_product_reference

TOKENS, CHECKED = 32768, 1000


def cases() -> Iterator[BenchmarkCase]:
    """TransNormerLLM-1B's SGLU and LLaMA-1B's SwiGLU, bf16."""
    yield _case("none", 5632)
    yield _case("silu", 4096)


def _case(activation: Activation, width: int) -> BenchmarkCase:
    halves = torch.randn(TOKENS, 2 * width, device="cuda", dtype=torch.bfloat16)

    def apply(op: BenchmarkFunction) -> BenchmarkFunction:
        def run(halves: Tensor) -> list[Tensor]:
            return [op(halves, activation=activation)]  # type: ignore[list-item]

        return run

    return BenchmarkCase(
        op="gated_product",
        shape=f"{activation} {TOKENS}x2x{width} bf16",
        inputs={"halves": halves},
        checked={"halves": halves[:CHECKED]},
        reference=apply(gated_product_reference),
        ours={"auto": apply(gated_product)},
        baselines={},
        bytes=BenchmarkWork(halves.nbytes * 3 / 2, halves.nbytes * 5 / 2),
        flops=BenchmarkWork(0, 0),
    )
