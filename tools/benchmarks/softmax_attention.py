"""Causal softmax attention of LLaMA-1B's 12 heads of 128 over 32,768 tokens: full, packed and windowed."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.case import BenchmarkCase, BenchmarkFunction, BenchmarkWork, Inputs
from megalin.ops.attention.causal import causal_attention
from megalin.ops.attention.softmax import softmax_attention, visible_tokens, within_window
from megalin.ops.documents import UNPACKED, PackedDocuments, find_documents

HEADS, KEY, CHECKED = 12, 128, 1000
SHAPES = ((4, 8192), (16, 2048), (1, 32768))
BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}


def cases() -> Iterator[BenchmarkCase]:
    """bf16; documents of 1024 tokens, and a window of the same size."""
    for batch, length in SHAPES:
        yield _case(batch, length, document=length, window=None)
        yield _case(batch, length, document=1024, window=None)
    yield _case(4, 8192, document=8192, window=1024)


def _case(batch: int, length: int, *, document: int, window: int | None) -> BenchmarkCase:
    heads = torch.randn(3, batch, length, HEADS, KEY, device="cuda", dtype=torch.bfloat16)
    inputs = dict(zip(("q", "k", "v"), heads, strict=True))
    packed, full = document < length, document == length and window is None

    @functools.cache
    def documents(rows: int, tokens: int) -> PackedDocuments:
        """Document layout of a batch; the gate's shorter inputs hold several documents too."""
        if not packed:
            return UNPACKED
        ids = torch.arange(tokens, device="cuda") // min(document, tokens // 3)
        return find_documents(ids.expand(rows, -1))

    def ours(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
        return [causal_attention(q, k, v, documents=documents(*q.shape[:2]), window=window)]

    def masked(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
        ids = documents(*q.shape[:2]).ids
        visible = visible_tokens(torch.zeros(1, q.shape[1], device="cuda") if ids is None else ids)
        return [softmax_attention(q, k, v, visible=visible if window is None else within_window(visible, window))]

    longest = min(document, window or document)
    visible_pairs = length * longest - longest * (longest - 1) / 2 if not packed else length * (longest + 1) / 2
    matmul = 2 * batch * visible_pairs * HEADS * KEY
    nbytes = inputs["q"].nbytes
    kind = f" window {window}" if window else f" documents of {document}" if packed else ""
    return BenchmarkCase(
        op="softmax_attention",
        shape=f"{batch}x{length}x{HEADS}x{KEY}{kind} bf16",
        inputs=inputs,
        checked=_checked(inputs),
        reference=masked,
        ours={"auto": ours},
        baselines={f"sdpa {name}": _only(backend) for name, backend in BACKENDS.items()} if full else {},
        bytes=BenchmarkWork(4 * nbytes, 8 * nbytes),
        flops=BenchmarkWork(2 * matmul, 5 * matmul),
        compiled=False,
        repeatable=False,
    )


def _checked(inputs: Inputs) -> Inputs:
    return {name: x[:2, :CHECKED] for name, x in inputs.items()}


def _only(backend: SDPBackend) -> BenchmarkFunction:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
        with sdpa_kernel(backend):
            return [softmax_attention(q, k, v)]

    return attention
