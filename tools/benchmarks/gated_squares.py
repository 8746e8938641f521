"""Gating and sums of squares of gated norms: 64 Mi elements at the models' widths."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch

from benchmarks.case import BenchmarkCase, BenchmarkWork
from megalin.ops.norms.gated_squares import gated_squares, gated_squares_reference

ELEMENTS = 2**26
WIDTHS = (1024, 2048, 4096, 8192, 12288)


def cases() -> Iterator[BenchmarkCase]:
    """bf16: the gate after an unweighted norm (TransNormerLLM, TNL), and before a weighted one (Rodimus, Mamba-2)."""
    for width in WIDTHS:
        x, gate = (torch.randn(ELEMENTS // width, width, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        inputs = {"x": x, "gate": gate}
        yield _case(f"{len(x)}x{width} bf16", inputs, gate_first=False)
        weight = torch.rand(width, device="cuda", dtype=torch.bfloat16)
        yield _case(f"{len(x)}x{width} bf16 gate first", {**inputs, "weight": weight}, gate_first=True)


def _case(shape: str, inputs: dict[str, torch.Tensor], *, gate_first: bool) -> BenchmarkCase:
    size = inputs["x"].nbytes
    return BenchmarkCase(
        op="gated_squares",
        shape=shape,
        inputs=inputs,
        checked={name: x[:4097] if x.dim() == 2 else x for name, x in inputs.items()},
        reference=functools.partial(gated_squares_reference, gate_first=gate_first),
        ours={
            backend: functools.partial(gated_squares, gate_first=gate_first, backend=backend)
            for backend in ("auto", "triton")
        },
        baselines={},
        bytes=BenchmarkWork(3 * size, 5 * size),
        flops=BenchmarkWork(0, 0),
    )
