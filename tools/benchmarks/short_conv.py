"""Short convolution of Rodimus and Mamba-2 on a slice of a projection: 4 taps, bias, silu."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from benchmarks.case import BenchmarkCase, BenchmarkFunction, BenchmarkWork
from megalin.ops.scans.short_conv import ShortConvOutput, short_conv, short_conv_reference

BATCH, LENGTH, WIDTH, CHECKED, TAPS, DOCUMENT = 4, 8192, 4096, 1000, 4, 600


def cases() -> Iterator[BenchmarkCase]:
    """bf16, the channels of Rodimus-1.3B and Mamba-2: unpacked, which baselines support too, and packed."""
    for packed in (False, True):
        yield _case(packed)


def _case(packed: bool) -> BenchmarkCase:
    batch, width = BATCH, WIDTH
    inputs = {
        "projection": torch.randn(batch, LENGTH, 2 * width, device="cuda", dtype=torch.bfloat16),
        "weight": torch.randn(width, TAPS, device="cuda", dtype=torch.bfloat16),
        "bias": torch.randn(width, device="cuda", dtype=torch.bfloat16),
    }
    documents = (torch.arange(LENGTH, device="cuda") // DOCUMENT).to(torch.int32).expand(batch, -1).contiguous()

    def apply(op: BenchmarkFunction) -> BenchmarkFunction:
        def run(projection: Tensor, weight: Tensor, bias: Tensor) -> list[Tensor]:
            x = projection.unflatten(-1, (2, width)).unbind(-2)[0]
            ids = documents[: len(x), : x.shape[1]] if packed else None
            return [op(x, weight, bias, document_ids=ids).output]

        return run

    read = inputs["projection"].nbytes // 2
    return BenchmarkCase(
        op="short_conv",
        shape=f"{batch}x{LENGTH}x{width}{' packed' if packed else ''} bf16",
        inputs=inputs,
        checked=inputs | {"projection": inputs["projection"][:2, :CHECKED]},
        reference=apply(short_conv_reference),
        ours={"auto": apply(short_conv)},
        baselines={} if packed else _baselines(apply),
        # The gradient covers the full projection: half of it, that of the gate, is zero.
        bytes=BenchmarkWork(2 * read, 4 * read),
        flops=BenchmarkWork(0, 0),
    )


def _baselines(apply: Callable[[BenchmarkFunction], BenchmarkFunction]) -> dict[str, BenchmarkFunction]:
    if importlib.util.find_spec("fla") is None:
        return {}
    from fla.modules.causal_conv1d.ops import causal_conv1d

    def baseline(x: Tensor, weight: Tensor, bias: Tensor, *, document_ids: None) -> ShortConvOutput:
        assert document_ids is None
        return ShortConvOutput(causal_conv1d(x, weight, bias, activation="silu")[0], x)

    return {"fla causal_conv1d": apply(baseline)}
