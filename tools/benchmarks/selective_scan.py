"""Selective scan: Mamba-1's 4,096 channels of 16 states."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from benchmarks.case import BenchmarkCase, BenchmarkFunction, BenchmarkWork
from megalin.ops.scans.selective_scan import selective_scan, selective_scan_reference

TOKENS, WIDTH, STATES, CHECKED = 16384, 4096, 16, 600
TOKEN_INPUTS = ("v", "q", "k", "step")


def cases() -> Iterator[BenchmarkCase]:
    """16,384 tokens in bf16, dt and A in fp32."""
    for length in (2048, 4096, 16384):
        yield _case(length)


def _case(length: int) -> BenchmarkCase:
    batch = TOKENS // length
    inputs = {
        "v": torch.randn(batch, length, WIDTH, device="cuda", dtype=torch.bfloat16),
        "q": torch.randn(batch, length, STATES, device="cuda", dtype=torch.bfloat16),
        "k": torch.randn(batch, length, STATES, device="cuda", dtype=torch.bfloat16),
        "step": 0.1 * torch.rand(batch, length, WIDTH, device="cuda"),
        "rates": -torch.arange(1.0, STATES + 1, device="cuda").expand(WIDTH, -1).contiguous(),
    }
    read, written = sum(x.nbytes for x in inputs.values()), inputs["v"].nbytes

    def apply(op: BenchmarkFunction) -> BenchmarkFunction:
        def run(v: Tensor, q: Tensor, k: Tensor, step: Tensor, rates: Tensor) -> list[Tensor]:
            return [op(q, k, v, step, rates)[0]]

        return run

    return BenchmarkCase(
        op="selective_scan",
        shape=f"B{batch} T{length} D{WIDTH} N{STATES} bf16",
        inputs=inputs,
        checked={name: x[:1, :CHECKED] if name in TOKEN_INPUTS else x for name, x in inputs.items()},
        reference=apply(selective_scan_reference),
        ours={"auto": apply(selective_scan)},
        baselines={},
        bytes=BenchmarkWork(read + written, 2 * read + written),
        flops=BenchmarkWork(0, 0),
        compiled=False,
    )
