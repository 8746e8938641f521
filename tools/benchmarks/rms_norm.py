"""RMSNorm with a weight: 64 Mi elements at the models' widths."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Iterator

import torch
from torch.nn import functional

from benchmarks.case import BenchmarkCase, BenchmarkFunction, BenchmarkWork
from megalin.ops.norms.rms_norm import rms_norm, rms_norm_reference

ELEMENTS = 2**26
WIDTHS = (1024, 2048, 4096, 8192)
EPS = 1e-6


def cases() -> Iterator[BenchmarkCase]:
    """One case per width, bf16."""
    for width in WIDTHS:
        x = torch.randn(ELEMENTS // width, width, device="cuda", dtype=torch.bfloat16)
        weight = torch.rand(width, device="cuda", dtype=torch.bfloat16)
        yield BenchmarkCase(
            op="rms_norm",
            shape=f"{len(x)}x{width} bf16",
            inputs={"x": x, "weight": weight},
            checked={"x": x[:4097], "weight": weight},
            reference=lambda x, weight: [rms_norm_reference(x, weight, eps=EPS)],
            ours={backend: functools.partial(_ours, backend=backend) for backend in ("auto", "triton")},
            baselines=_baselines(),
            bytes=BenchmarkWork(2 * x.nbytes, 3 * x.nbytes),
            flops=BenchmarkWork(0, 0),
        )


def _ours(x: torch.Tensor, weight: torch.Tensor, *, backend: str) -> list[torch.Tensor]:
    return [rms_norm(x, weight, eps=EPS, backend=backend)]


def _baselines() -> dict[str, BenchmarkFunction]:
    baselines: dict[str, BenchmarkFunction] = {
        "F.rms_norm": lambda x, weight: [functional.rms_norm(x, x.shape[-1:], weight, EPS)]
    }
    if importlib.util.find_spec("fla") is not None:
        from fla.modules.layernorm import rms_norm as fla_rms_norm

        baselines["fla"] = lambda x, weight: [fla_rms_norm(x, weight, None, eps=EPS)]
    if importlib.util.find_spec("liger_kernel") is not None:
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction

        # Not in place: it would overwrite the gradient that the next repetition reads.
        baselines["Liger"] = lambda x, weight: [LigerRMSNormFunction.apply(x, weight, EPS, 0.0, "llama", False)]
    return baselines
