"""TPE at cosFormer2-1B's size: 32,768 tokens, 1536 channels, 128 decays."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from benchmarks.case import BenchmarkCase, BenchmarkWork
from megalin.ops.scans.tpe import tpe, tpe_reference

BATCH, LENGTH, WIDTH, DECAYS, CHECKED = 4, 8192, 1536, 128, 1000


def cases() -> Iterator[BenchmarkCase]:
    """Initial decays, bf16, packed documents."""
    x = torch.randn(BATCH, LENGTH, WIDTH, device="cuda", dtype=torch.bfloat16)
    log_decay = torch.nn.functional.logsigmoid(torch.linspace(-4.0, 4.0, DECAYS, device="cuda"))
    inputs = {
        "x": x,
        "coefficients": torch.randn(WIDTH, DECAYS, device="cuda") / DECAYS,
        "log_decay": log_decay,
        "document_ids": (torch.arange(LENGTH, device="cuda") // 2048).int().expand(BATCH, -1).contiguous(),
    }

    def ours(x: Tensor, coefficients: Tensor, log_decay: Tensor, document_ids: Tensor) -> list[Tensor]:
        return [tpe(x, coefficients, log_decay, document_ids=document_ids).output]

    def reference(x: Tensor, coefficients: Tensor, log_decay: Tensor, document_ids: Tensor) -> list[Tensor]:
        return [tpe_reference(x, coefficients, log_decay, document_ids=document_ids).output]

    yield BenchmarkCase(
        op="tpe",
        shape=f"{BATCH}x{LENGTH}x{WIDTH} {DECAYS} decays bf16",
        inputs=inputs,
        checked=inputs | {"x": x[:1, :CHECKED], "document_ids": inputs["document_ids"][:1, :CHECKED]},
        reference=reference,
        ours={"auto": ours},
        baselines={},
        bytes=BenchmarkWork(2 * x.nbytes, 3 * x.nbytes),
        # Matmuls with powers of the decays, once each: for S and y; for R and dx, and for S, Q, W and W' (the kernels).
        flops=BenchmarkWork(4 * x.numel() * DECAYS, 12 * x.numel() * DECAYS),
        compiled=False,
    )
