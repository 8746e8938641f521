"""Scan with a fixed scalar decay per head, 16 heads of 128, and without decay, 256 keys a head (cosFormer2)."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Iterator

import torch
from torch import Tensor

from benchmarks.case import BenchmarkCase, BenchmarkFunction, BenchmarkWork
from megalin.ops.scans.fixed_decay import decay_scan, decay_scan_flops, decay_scan_reference

TOKENS, HEADS, VALUE, CHECKED, CHUNK = 32768, 16, 128, 600, 64


def cases() -> Iterator[BenchmarkCase]:
    """32,768 tokens in sequences of three lengths, and one sequence of four times as many; bf16."""
    for batch, length in ((16, 2048), (4, 8192), (1, 32768), (1, 131072)):
        yield _case(f"B{batch} T{length} K128", batch, length, 128, decay=True)
    for batch, length in ((4, 8192), (1, 32768)):
        yield _case(f"B{batch} T{length} K256 no decay", batch, length, 256, decay=False)


def _case(shape: str, batch: int, length: int, key: int, *, decay: bool) -> BenchmarkCase:
    draw = functools.partial(torch.randn, device="cuda", dtype=torch.bfloat16)
    slopes = torch.exp2(-torch.arange(1, HEADS + 1, device="cuda") * 8.0 / HEADS) if decay else None
    inputs = {name: draw(batch, length, HEADS, width) for name, width in (("q", key), ("k", key), ("v", VALUE))}
    read, written = sum(x.nbytes for x in inputs.values()), inputs["v"].nbytes
    sizes = {"num_heads": HEADS, "key_dim": key, "value_dim": VALUE, "chunk_size": CHUNK}
    flops = batch * length * decay_scan_flops(length, **sizes)

    def apply(op: BenchmarkFunction) -> BenchmarkFunction:
        def run(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
            return [op(q, k, v, None if slopes is None else slopes.to(torch.promote_types(q.dtype, slopes.dtype)))[0]]

        return run

    built = importlib.util.find_spec("megalin._C") is not None
    backends = ["triton", "cuda"] if built else ["triton"]
    others = {name: apply(functools.partial(decay_scan, backend=name)) for name in backends}
    return BenchmarkCase(
        op="decay_scan",
        shape=f"{shape} bf16",
        inputs=inputs,
        checked={name: x[:1, :CHECKED] for name, x in inputs.items()},
        reference=apply(decay_scan_reference),
        ours={"auto": apply(decay_scan)} | others,
        baselines=_baselines(slopes),
        bytes=BenchmarkWork(read + written, 2 * read + written),
        flops=BenchmarkWork(flops, 2 * flops),
        compiled=False,
    )


def _baselines(slopes: Tensor | None) -> dict[str, BenchmarkFunction]:
    if importlib.util.find_spec("fla") is None:
        return {}
    from fla.ops.simple_gla import chunk_simple_gla

    def baseline(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
        return [chunk_simple_gla(q, k, v, g_gamma=None if slopes is None else -slopes, scale=1.0)[0]]

    return {"fla chunk_simple_gla": baseline}
