"""Vector-decay scan: HGRN2's heads at three lengths with mild and with steep decays, and Rodimus' one wide head."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Iterator

import torch
from torch import Tensor

from benchmarks.case import BenchmarkCase, BenchmarkFunction, BenchmarkWork
from megalin.ops.scans.fixed_decay import decay_scan_flops
from megalin.ops.scans.vector_decay import (
    vector_decay_scan,
    vector_decay_scan_reference,
)

TOKENS, CHECKED, CHUNK = 32768, 600, 64


def cases() -> Iterator[BenchmarkCase]:
    """32,768 tokens; v in bf16, q and k in bf16 (HGRN2) or fp32 (Rodimus), g in fp32."""
    for length in (2048, 8192, 32768):
        yield _case(f"HGRN2 B{TOKENS // length} T{length}", length, 16, 128, 128, torch.bfloat16, 1.0)
    yield _case("HGRN2 steep B16 T2048", 2048, 16, 128, 128, torch.bfloat16, -3.0)
    yield _case("Rodimus B4 T8192", 8192, 1, 64, 4096, torch.float32, 3.0)


def _case(shape: str, length: int, heads: int, key: int, value: int, dtype: torch.dtype, logit: float) -> BenchmarkCase:
    """Forget gates around sigmoid(logit): with 1 a chunk of 64 decays by about exp(-20), with -3 by exp(-150)."""
    rows = (TOKENS // length, length, heads)
    forget = 0.05 + 0.95 * torch.sigmoid(torch.randn(*rows, key, device="cuda") + logit)
    inputs = {
        "v": torch.randn(*rows, value, device="cuda", dtype=torch.bfloat16),
        "q": torch.randn(*rows, key, device="cuda", dtype=dtype),
        "k": (1.0 - forget).to(dtype),
        "log_decay": forget.log(),
    }
    in_bytes = sum(x.nbytes for x in inputs.values())
    out_bytes = inputs["v"].nbytes
    flops = TOKENS * decay_scan_flops(length, num_heads=heads, key_dim=key, value_dim=value, chunk_size=CHUNK)
    return BenchmarkCase(
        op="vector_decay_scan",
        shape=shape,
        inputs=inputs,
        checked={name: x[:1, :CHECKED].contiguous() for name, x in inputs.items()},
        reference=functools.partial(_run, vector_decay_scan_reference),
        ours={"auto": functools.partial(_run, vector_decay_scan)},
        baselines=_baselines(),
        bytes=BenchmarkWork(in_bytes + out_bytes, 2 * in_bytes + out_bytes),
        flops=BenchmarkWork(flops, 2 * flops),
        compiled=False,
    )


def _run(function: BenchmarkFunction, v: Tensor, q: Tensor, k: Tensor, log_decay: Tensor) -> list[Tensor]:
    return [function(q, k, v, log_decay)[0]]


def _baselines() -> dict[str, BenchmarkFunction]:
    if importlib.util.find_spec("fla") is None:
        return {}
    from fla.ops.gla import chunk_gla

    def baseline(v: Tensor, q: Tensor, k: Tensor, log_decay: Tensor) -> list[Tensor]:
        return [chunk_gla(q.to(v.dtype), k.to(v.dtype), v, log_decay, scale=1.0)[0]]

    return {"fla chunk_gla": baseline}
