"""SRMSNorm: 64 Mi elements at the models' widths."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
from torch.nn import functional

from benchmarks.case import BenchmarkCase, BenchmarkWork
from megalin.ops.norms.srmsnorm import srmsnorm, srmsnorm_reference

ELEMENTS = 2**26
WIDTHS = (64, 1024, 2048, 4096, 5120, 8192, 12288, 16384)
EPS = 1e-6


def cases() -> Iterator[BenchmarkCase]:
    """One case per width, bf16."""
    for width in WIDTHS:
        rows = ELEMENTS // width
        x = torch.randn(rows, width, device="cuda", dtype=torch.bfloat16)
        yield BenchmarkCase(
            op="srmsnorm",
            shape=f"{rows}x{width} bf16",
            inputs={"x": x},
            checked={"x": x[:4097]},
            reference=lambda x: [srmsnorm_reference(x, eps=EPS)],
            ours={backend: functools.partial(_ours, backend=backend) for backend in ("auto", "triton", "cuda")},
            baselines={"F.rms_norm": lambda x: [functional.rms_norm(x, x.shape[-1:], eps=EPS)]},
            bytes=BenchmarkWork(2 * x.nbytes, 3 * x.nbytes),
            flops=BenchmarkWork(0, 0),
        )


def _ours(x: torch.Tensor, *, backend: str) -> list[torch.Tensor]:
    return [srmsnorm(x, eps=EPS, backend=backend)]
