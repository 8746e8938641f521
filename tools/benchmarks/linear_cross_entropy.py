"""Linear + cross entropy: 16,384 tokens, width 2048, a vocabulary of 100,352 (100,280 padded, for baselines too).

Ours, Liger's and QuACK's compute the gradients with the loss, so only forward and backward together are comparable.
QuACK's backward scales the saved gradients in place and cannot be repeated.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.case import BenchmarkCase, BenchmarkFunction, BenchmarkWork
from megalin.ops.linear_cross_entropy import linear_cross_entropy_reference
from megalin.parallel.collectives import Axis
from megalin.parallel.cross_entropy import IGNORED_LABEL, vocab_parallel_linear_cross_entropy

TOKENS, CHECKED, WIDTH, ROWS = 16384, 2049, 2048, 100352


def cases() -> Iterator[BenchmarkCase]:
    """One case, bf16, the sum of the losses."""
    x = torch.randn(TOKENS, WIDTH, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(ROWS, WIDTH, device="cuda", dtype=torch.bfloat16) * WIDTH**-0.5
    labels = torch.randint(ROWS, (TOKENS,), device="cuda")
    inputs = {"x": x, "weight": weight, "labels": labels}
    flops = 2 * TOKENS * WIDTH * ROWS
    yield BenchmarkCase(
        op="linear_cross_entropy",
        shape=f"{TOKENS}x{WIDTH}x{ROWS} bf16",
        inputs=inputs,
        checked={"x": x[:CHECKED], "weight": weight, "labels": labels[:CHECKED]},
        reference=_reference,
        ours={"auto": _ours},
        baselines=_baselines(),
        bytes=BenchmarkWork(x.nbytes + weight.nbytes, 2 * (x.nbytes + weight.nbytes)),
        flops=BenchmarkWork(flops, 2 * flops),
        compiled=False,
        captured=False,
        retained=False,
    )


def _reference(x: Tensor, weight: Tensor, labels: Tensor) -> list[Tensor]:
    ones = torch.ones_like(labels, dtype=torch.promote_types(x.dtype, torch.float32))
    return [
        linear_cross_entropy_reference(
            x, weight, labels, vocab_size=len(weight), ignored_label=IGNORED_LABEL, token_weights=ones
        )
    ]


def _ours(x: Tensor, weight: Tensor, labels: Tensor) -> list[Tensor]:
    return [vocab_parallel_linear_cross_entropy(x, weight, labels, Axis("tp"), vocab_size=len(weight))]


def _baselines() -> dict[str, BenchmarkFunction]:
    found: dict[str, BenchmarkFunction] = {"torch bf16 loss": _torch_low}
    if importlib.util.find_spec("liger_kernel") is not None:
        from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction as Fused

        def liger(x: Tensor, weight: Tensor, labels: Tensor, dtype: torch.dtype | None) -> list[Tensor]:
            result = Fused.apply(x, weight, labels, None, None, IGNORED_LABEL, 0.0, 0.0, "sum", None, False, dtype)
            return [result[0]]

        found["Liger"] = lambda x, weight, labels: liger(x, weight, labels, None)
        found["Liger, fp32 sums"] = lambda x, weight, labels: liger(x, weight, labels, torch.float32)
    if importlib.util.find_spec("quack") is not None:
        from quack.linear_cross_entropy import chunked_linear_cross_entropy

        def quack(x: Tensor, weight: Tensor, labels: Tensor, chunk: int) -> list[Tensor]:
            loss = chunked_linear_cross_entropy(
                x, weight, labels, chunk_size=chunk, ignore_index=IGNORED_LABEL, reduction="sum"
            )
            return [loss]

        found["QuACK"] = lambda x, weight, labels: quack(x, weight, labels, 4096)  # its default
        found["QuACK, 8192 tokens"] = lambda x, weight, labels: quack(x, weight, labels, 8192)
    if importlib.util.find_spec("fla") is not None:
        from fla.modules import FusedCrossEntropyLoss

        loss = FusedCrossEntropyLoss(reduction="sum")
        found["fla fused CE"] = lambda x, weight, labels: [loss(functional.linear(x, weight), labels)]
    return found


def _torch_low(x: Tensor, weight: Tensor, labels: Tensor) -> list[Tensor]:
    return [functional.cross_entropy(functional.linear(x, weight), labels, reduction="sum")]
