"""Scan of tied forget gates: a layer of hgrn2-1b with mild decays, with gates inside the kernels and before them."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
from torch import Tensor

from benchmarks.case import BenchmarkCase, BenchmarkFunction, BenchmarkWork
from megalin.ops.gates.forget_gate_scan import forget_gate_scan, forget_gate_scan_reference
from megalin.ops.gates.forget_gates import forget_gates
from megalin.ops.scans.fixed_decay import decay_scan_flops
from megalin.ops.scans.vector_decay import vector_decay_scan

TOKENS, HEADS, WIDTH, CHECKED, CHUNK = 32768, 12, 128, 600, 64


def cases() -> Iterator[BenchmarkCase]:
    """32,768 tokens of 12 heads of 128 in bf16, in sequences of two lengths."""
    for length in (2048, 8192):
        yield _case(length)


def _case(length: int) -> BenchmarkCase:
    shape = (TOKENS // length, length, HEADS, WIDTH)
    q, logit, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    inputs = {"q": q, "logit": logit + 3.0, "v": v, "bound": 0.5 * torch.rand(HEADS, WIDTH, device="cuda")}
    in_bytes = sum(x.nbytes for x in inputs.values())
    flops = TOKENS * decay_scan_flops(length, num_heads=HEADS, key_dim=WIDTH, value_dim=WIDTH, chunk_size=CHUNK)
    return BenchmarkCase(
        op="forget_gate_scan",
        shape=f"B{shape[0]} T{length}",
        inputs=inputs,
        checked={name: x if name == "bound" else x[:1, :CHECKED].contiguous() for name, x in inputs.items()},
        reference=functools.partial(_run, forget_gate_scan_reference),
        ours={name: functools.partial(_run, forget_gate_scan, backend=name) for name in ("auto", "triton")},
        baselines={"gates, then the scan": _in_turn},
        bytes=BenchmarkWork(in_bytes + v.nbytes, 2 * in_bytes + v.nbytes),
        flops=BenchmarkWork(flops, 2 * flops),
        compiled=False,
    )


def _run(function: BenchmarkFunction, **inputs: Tensor | str) -> list[Tensor]:
    return [function(**inputs)[0]]


def _in_turn(q: Tensor, logit: Tensor, v: Tensor, bound: Tensor) -> list[Tensor]:
    k, log_decay = (x.view_as(logit) for x in forget_gates(logit.flatten(2), bound.flatten()))
    return [vector_decay_scan(q, k, v, log_decay)[0]]
