"""Scan with a data-dependent scalar decay: Mamba-2's 64 heads of 64 values that share one head of 128 keys."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from benchmarks.case import BenchmarkCase, BenchmarkFunction, BenchmarkWork
from megalin.ops.scans.scalar_decay import scalar_decay_scan, scalar_decay_scan_flops, scalar_decay_scan_reference

TOKENS, HEADS, KEY, VALUE, CHECKED, CHUNK = 32768, 64, 128, 64, 600, 64


def cases() -> Iterator[BenchmarkCase]:
    """32,768 tokens in bf16, g in fp32."""
    for length in (2048, 8192, 32768):
        yield _case(length)


def _case(length: int) -> BenchmarkCase:
    batch = TOKENS // length
    inputs = {
        "v": torch.randn(batch, length, HEADS, VALUE, device="cuda", dtype=torch.bfloat16),
        "q": torch.randn(batch, length, 1, KEY, device="cuda", dtype=torch.bfloat16),
        "k": torch.randn(batch, length, 1, KEY, device="cuda", dtype=torch.bfloat16),
        "log_decay": -torch.rand(batch, length, HEADS, device="cuda"),
    }
    read, written = sum(x.nbytes for x in inputs.values()), inputs["v"].nbytes
    sizes = {"num_heads": HEADS, "num_key_heads": 1, "key_dim": KEY, "value_dim": VALUE, "chunk_size": CHUNK}
    flops = TOKENS * scalar_decay_scan_flops(length, **sizes)

    def apply(op: BenchmarkFunction) -> BenchmarkFunction:
        def run(v: Tensor, q: Tensor, k: Tensor, log_decay: Tensor) -> list[Tensor]:
            return [op(q, k, v, log_decay)[0]]

        return run

    return BenchmarkCase(
        op="scalar_decay_scan",
        shape=f"B{batch} T{length} H{HEADS} bf16",
        inputs=inputs,
        checked={name: x[:1, :CHECKED] for name, x in inputs.items()},
        reference=apply(scalar_decay_scan_reference),
        ours={"auto": apply(scalar_decay_scan)},
        baselines={},
        bytes=BenchmarkWork(read + written, 2 * read + written),
        flops=BenchmarkWork(flops, 2 * flops),
        compiled=False,
    )
