"""AdamW of the weights of TransNormerLLM-1B: its matrices, a table of 50,304 words, and norms; bytes of one update."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from benchmarks.case import BenchmarkCase, BenchmarkFunction, BenchmarkWork
from megalin.ops.adamw_update import (
    AdamWOptions,
    UpdateTables,
    UpdateTensors,
    adamw_update,
    adamw_update_reference,
)

SHAPES = ((50304, 2048), *((4, 2048, 2048), (2048, 2048), (2, 5632, 2048), (2048, 5632), (2048,)) * 3)
"""Of 3 blocks, enough to exceed every cache."""
CHECKED = ((257, 64), (33,))
OPTIONS = AdamWOptions(lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)


def _inputs(shapes: Sequence[tuple[int, ...]], gradients: torch.dtype) -> dict[str, Tensor]:
    found = {}
    for i, shape in enumerate(shapes):
        values = torch.randn(3, *shape, device="cuda")
        found |= {f"weight {i}": 0.02 * values[0], f"gradient {i}": values[1].to(gradients)}
        found |= {f"mean {i}": 0.1 * values[2], f"square {i}": values[2].square()}
    return found


def cases() -> Iterator[BenchmarkCase]:
    """Gradients in bf16 and fp32, with copies in bf16; the update is in place, and of copies where it is checked."""
    scale, skip = torch.tensor(0.5, device="cuda"), torch.tensor(0.0, device="cuda")
    step, tables = torch.tensor(10.0, device="cuda"), UpdateTables()

    def apply(op: BenchmarkFunction) -> BenchmarkFunction:
        def run(**inputs: Tensor) -> list[Tensor]:
            count = len(inputs) // 4
            if count == len(CHECKED):
                inputs = {name: x.clone() for name, x in inputs.items()}
            names = ("weight", "gradient", "mean", "square")
            weights, gradients, means, squares = ([inputs[f"{name} {i}"] for i in range(count)] for name in names)
            copies = copies_of.setdefault(count, [x.bfloat16() for x in weights])
            op(UpdateTensors(weights, gradients, means, squares, [step] * count, [*copies]))
            return [*weights, *means, *squares]

        return run

    def ours(tensors: UpdateTensors) -> list[Tensor]:
        adamw_update(tensors, scale=scale, skip=skip, options=OPTIONS, tables=tables)
        return []

    def reference(tensors: UpdateTensors) -> list[Tensor]:
        adamw_update_reference(tensors, scale=scale, skip=skip, options=OPTIONS)
        return []

    copies_of: dict[int, list[Tensor]] = {}
    elements = sum(torch.Size(shape).numel() for shape in SHAPES)
    for dtype in (torch.bfloat16, torch.float32):
        yield BenchmarkCase(
            op="adamw_update",
            shape=f"{elements / 1e6:.0f}M elements, gradients in {str(dtype).removeprefix('torch.')}",
            inputs=_inputs(SHAPES, dtype),
            checked=_inputs(CHECKED, dtype),
            reference=apply(reference),
            ours={"triton": apply(ours)},
            baselines={},
            bytes=BenchmarkWork((26 + dtype.itemsize) * elements, 0),
            flops=BenchmarkWork(0, 0),
            compiled=False,
            captured=False,
            differentiable=False,
        )
