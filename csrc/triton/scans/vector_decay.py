"""Launches of the vector-decay scan: scores of all chunks, sweeps of states, gradients of all chunks.

Bytes, of n = B T H elements K or V wide: the scores read q, k, g and write q, k decayed and the sums of g (one fp32),
and C/K of an element for A; the forward sweep reads three and A, writes the output and V/C of a state; the reverse
sweep likewise; the gradients read q, k, v, do, the sums and two states per chunk and write dq, dk and dg.

With `gates`, k is the logits of tied forget gates and log_decay their lower bounds [H, K] (vector_decay_gates.py): one
tensor of 2 bytes an element in place of 6, of logits and of their gradients.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

import triton
from megalin._triton.dispatch.chips import has_tensor_memory, shared_bytes
from megalin._triton.scans.vector_decay_chunk import gradients_kernel, products_kernel, scores_kernel
from megalin._triton.scans.vector_decay_mild import (
    mild_gate_gradients_kernel,
    mild_gradients_kernel,
    mild_scores_kernel,
)
from megalin._triton.scans.vector_decay_sweep import forward_kernel, reverse_kernel, segment_kernel, total_kernel

CHUNK = 64
PROGRAMS = 512
"""Programs of a sweep (segments x tiles) that fill an H200, four per SM."""
SEGMENT_CHUNKS = 8
"""Minimum chunks per segment: each segment re-reads the updates of those before it."""
FP32_BLOCK = 32
"""Triton 3.6 reads outside of shared memory, or gives wrong gradients without an error, in fp32 blocks of 16."""


class Chunks(NamedTuple):
    """Results that depend on one chunk only; N chunks of C tokens, T padded to N C."""

    q_start: Tensor
    """[B, H, N C, K] scale * q decayed from the start of its chunk, in the dtype of v."""
    k_end: Tensor
    """The same of k, decayed to the end of its chunk."""
    scores: Tensor
    """[B, H, N C, C] in the dtype of v."""
    through: Tensor
    """[B, H, N, K] fp32, the decay through each chunk, 0 through a document's end."""
    kind: Tensor
    """[B, H, N] int32: kind of each chunk's decays (vector_decay_mild.py); uninitialised for fp32, which has no mild
    kernels."""


class Segments(NamedTuple):
    """State update of each segment of chunks [B, H, segments, K, V], and the decay through it [B, H, segments, K],
    fp32; in the direction of a sweep."""

    update: Tensor
    decay: Tensor


def begin(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, scale: float, documents: Tensor | None, *, total: bool,
    gates: bool,
) -> tuple[Tensor, Tensor, Chunks, Segments]:  # fmt: skip
    """First phase: the final state from zero [B, H, K, V] and the total decay [B, H, K], fp32, empty unless `total`,
    and the inputs of `finish`.

    q, k, log_decay [B, T, H, K] and v [B, T, H, V], last dimension contiguous; documents [B, T] contiguous.
    """
    chunks = _chunks(q, k, v, log_decay, scale, documents, gates)
    segments = _sum_segments(chunks.k_end, v, chunks.through, reverse=False, last=total)
    return *total_update(segments, v, reverse=False, total=total), chunks, segments


def finish(
    v: Tensor, entering: Tensor | None, chunks: Chunks, segments: Segments, keep: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Second phase, from entering [B, H, K, V]: output [B, T, H, V], final state [B, H, K, V] in fp32, and for the
    backward, if `keep`, the states [B, H, N, K, V] entering chunks, in the dtype of v."""
    batch, length, heads, _ = v.shape
    width = chunks.through.shape[3]
    constants = _sweep_constants(width, v.shape[3], v.dtype)
    plan = _segments(v, chunks.through.shape[2], constants)
    output = torch.empty_like(v, memory_format=torch.contiguous_format)
    final = v.new_empty(batch, heads, width, v.shape[3], dtype=torch.float32)
    states = v.new_empty(*chunks.through.shape, v.shape[3]) if keep else v.new_empty(0)
    forward_kernel[(plan.programs,)](
        *chunks[:2], v, chunks.scores, chunks.through, *segments, entering, output, states, final,
        *v.stride()[:3], length, chunks.through.shape[2], heads, plan.segments, plan.chunks,
        INITIAL=entering is not None, KEEP=keep, **constants,
    )  # fmt: skip
    return output, final, states


def begin_backward(doutput: Tensor, chunks: Chunks, *, total: bool) -> tuple[Tensor, Segments]:
    """First phase of the backward: the output's contribution to the gradient of the initial state [B, H, K, V] fp32,
    empty unless `total`, and the inputs of `finish_backward`."""
    segments = _sum_segments(chunks.q_start, doutput, chunks.through, reverse=True, last=total)
    return total_update(segments, doutput, reverse=True, total=total)[0], segments


def finish_backward(
    doutput: Tensor, dfinal: Tensor | None, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, scale: float,
    documents: Tensor | None, chunks: Chunks, states: Tensor, segments: Segments, *, gates: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Second phase of the backward: gradients of q, k, v, log_decay and `entering`, contiguous."""
    batch, length, heads, width = q.shape
    number = chunks.through.shape[2]
    constants = _sweep_constants(width, v.shape[3], v.dtype)
    plan = _segments(v, number, constants)
    dv, dstates = v.new_empty(v.shape), torch.empty_like(states)
    dinitial = v.new_empty(batch, heads, width, v.shape[3], dtype=torch.float32)
    reverse_kernel[(plan.programs,)](
        *chunks[:2], doutput, chunks.scores, chunks.through, *segments, dfinal, dv, dstates, dinitial,
        *doutput.stride()[:3], length, number, heads, plan.segments, plan.chunks,
        FINAL=dfinal is not None, **constants,
    )  # fmt: skip
    dq_start, dk_end = torch.empty_like(chunks.q_start), torch.empty_like(chunks.k_end)
    dscores, dthrough = torch.empty_like(chunks.scores), torch.empty_like(chunks.through)
    dself = chunks.through.new_empty(chunks.scores.shape[:-1])
    constants = _products_constants(width, v.shape[3], v.dtype)
    products_kernel[(batch * heads * number, triton.cdiv(width, constants["BLOCK_K"]))](
        v, doutput, states, dstates, dq_start, dk_end, dscores, dself, dthrough,
        *v.stride()[:3], *doutput.stride()[:3], length, number, heads, **constants,
    )  # fmt: skip
    dq, dk = q.new_empty(q.shape), k.new_empty(k.shape)
    # Of bounds, one summand per chunk.
    dg = torch.empty_like(chunks.through) if gates else q.new_empty(q.shape, dtype=torch.float32)
    strides = _strides(q, k, log_decay, gates)
    masks, some = _level_masks(v.device, v.dtype), v.dtype != torch.float32
    from_products = (dq_start, dk_end, dscores, dself, dthrough)
    if some:
        constants = _mild_gradients_constants(width)
        grid = (batch * heads * number, triton.cdiv(width, constants["BLOCK_K"]))
        kernel = mild_gate_gradients_kernel if gates else mild_gradients_kernel
        kernel[grid](
            q, k, log_decay, masks, chunks.kind, *from_products, dq, dk, dg,
            *(strides[:6] + strides[8:] if gates else strides), length, number, heads, scale, **constants,
        )  # fmt: skip
    constants = _gradients_constants(width, v.dtype)
    gradients_kernel[(batch * heads * number, triton.cdiv(width, constants["BLOCK_K"]))](
        q, k, log_decay, documents, masks, chunks.kind, chunks.through, *from_products, dq, dk, dg,
        *strides, length, number, heads, scale,
        DOCUMENTS=documents is not None, SOME=some, GATES=gates, **constants,
    )  # fmt: skip
    return dq, dk, dv, dg.sum((0, 2)) if gates else dg, dinitial


def empty_chunks(q: Tensor, v: Tensor) -> Chunks:
    """Uninitialised Chunks."""
    batch, length, heads, width = q.shape
    number = triton.cdiv(length, CHUNK)
    shape = (batch, heads, number * CHUNK)
    return Chunks(
        v.new_empty(*shape, width),
        v.new_empty(*shape, width),
        v.new_empty(*shape, CHUNK),
        v.new_empty(batch, heads, number, width, dtype=torch.float32),
        v.new_empty(batch, heads, number, dtype=torch.int32),
    )


def _strides(q: Tensor, k: Tensor, log_decay: Tensor, gates: bool) -> tuple[int, ...]:
    """Strides of q, k and log_decay over batch, tokens and heads; bounds [H, K] have none over the first two."""
    return *q.stride()[:3], *k.stride()[:3], *((0, 0, log_decay.stride(0)) if gates else log_decay.stride()[:3])


def _chunks(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, scale: float, documents: Tensor | None, gates: bool
) -> Chunks:
    batch, length, heads, width = q.shape
    number = triton.cdiv(length, CHUNK)
    chunks = empty_chunks(q, v)
    strides = _strides(q, k, log_decay, gates)
    masks, some = _level_masks(v.device, v.dtype), v.dtype != torch.float32
    if some:
        mild_scores_kernel[(batch * heads * number,)](
            q, k, log_decay, documents, masks, *chunks, *strides, length, number, heads, scale,
            DOCUMENTS=documents is not None, TENSOR_MEMORY=has_tensor_memory(), GATES=gates,
            **_mild_scores_constants(width),
        )  # fmt: skip
    scores_kernel[(batch * heads * number,)](
        q, k, log_decay, documents, masks, chunks.kind, *chunks[:4], *strides, length, number, heads, scale,
        DOCUMENTS=documents is not None, SOME=some, GATES=gates, **_scores_constants(width, v.dtype),
    )  # fmt: skip
    return chunks


@functools.cache
def _level_masks(device: torch.device, dtype: torch.dtype) -> Tensor:
    """Zeros and ones [levels + 1, 2, C, C]: per level, the pairs of tokens that belong to it, and the tokens between
    each token and its pivot; last, the tokens up to each token, and those after it."""
    t, j = torch.arange(CHUNK)[:, None], torch.arange(CHUNK)
    masks = []
    for level in range(CHUNK.bit_length() - 1):
        halves, odd = (t ^ j) >> level, (t >> level) & 1 == 1
        masks.append(torch.stack([halves == 1, (halves == 0) & ((j <= t) == odd)]))
    masks.append(torch.stack([j <= t, j > t]))
    return torch.stack(masks).to(device=device, dtype=dtype)


class _Plan(NamedTuple):
    segments: int
    chunks: int
    """Chunks per segment; the last may have fewer."""
    programs: int


def _segments(v: Tensor, chunks: int, constants: dict[str, int]) -> _Plan:
    batch, _, heads, width = v.shape
    rows = batch * heads * triton.cdiv(width, constants["BLOCK_V"])
    segments = max(1, min(PROGRAMS // rows, chunks // SEGMENT_CHUNKS))
    each = triton.cdiv(chunks, segments)
    segments = triton.cdiv(chunks, each)
    return _Plan(segments, each, rows * segments)


def empty_segments(y: Tensor, keys: int, *, last: bool) -> Segments:
    """Uninitialised Segments of a sweep over y [B, T, H, V]; unless `last` none of a single segment."""
    batch, length, heads, width = y.shape
    constants = _sweep_constants(keys, width, y.dtype)
    segments = _segments(y, triton.cdiv(length, CHUNK), constants).segments
    shape = (batch, heads, 0 if segments == 1 and not last else segments, keys)
    return Segments(*(y.new_empty(x, dtype=torch.float32) for x in ((*shape, width), shape)))


def _sum_segments(x: Tensor, y: Tensor, through: Tensor, *, reverse: bool, last: bool) -> Segments:
    """Updates and decays of all segments, without the sweep's last unless `last`."""
    (_, length, heads, width), (chunks, keys) = y.shape, through.shape[2:]
    constants = _sweep_constants(keys, width, y.dtype)
    plan = _segments(y, chunks, constants)
    update, decay = found = empty_segments(y, keys, last=last)
    if update.shape[2] == 0:
        return found
    segment_kernel[(plan.programs,)](
        x, y, through, update, decay, *y.stride()[:3], length, chunks, heads, plan.segments, plan.chunks,
        REVERSE=reverse, LAST=last, **constants,
    )  # fmt: skip
    return found


def total_update(segments: Segments, y: Tensor, *, reverse: bool, total: bool) -> tuple[Tensor, Tensor]:
    """State update of all segments together [B, H, K, V], and decay through them [B, H, K]; empty unless `total`."""
    if not total:
        return segments.update.new_empty(0), segments.decay.new_empty(0)
    batch, heads, number, keys, width = segments.update.shape
    constants = _sweep_constants(keys, width, y.dtype)
    update, decay = segments.update.new_empty(batch, heads, keys, width), segments.decay.new_empty(batch, heads, keys)
    total_kernel[(batch * heads * triton.cdiv(width, constants["BLOCK_V"]),)](
        *segments, update, decay, number, REVERSE=reverse, **constants
    )
    return update, decay


def _block(width: int, largest: int) -> int:
    return min(largest, max(16, triton.next_power_of_2(width)))


def _scores_constants(width: int, dtype: torch.dtype) -> dict[str, int]:
    block = FP32_BLOCK if dtype == torch.float32 else _block(width, 64)
    return {"K": width, "BLOCK_K": block, "num_warps": 4, "num_stages": 1}


def _mild_scores_constants(width: int) -> dict[str, int]:
    return {"K": width, "BLOCK_K": _block(width, 64), "num_warps": 4, "num_stages": 1}


def _mild_gradients_constants(width: int) -> dict[str, int]:
    return {"K": width, "BLOCK_K": 64, "num_warps": 4, "num_stages": 1}


def _sweep_constants(width: int, values: int, dtype: torch.dtype) -> dict[str, int]:
    if dtype == torch.float32:
        key = max(FP32_BLOCK, _block(width, 256))
        pipelined = 128 if shared_bytes() > 2**17 else 64  # keys; two stages of 128 take 120 KB
        value, warps, stages = max(FP32_BLOCK, _block(values, 4096 // key)), 8, 2 if key <= pipelined else 1
    else:
        key = _block(width, 256)
        value, warps, stages = _block(values, 8192 // max(key, 128)), 4, 3 if key <= 128 else 2
    return {"K": width, "V": values, "BLOCK_K": key, "BLOCK_V": value, "num_warps": warps, "num_stages": stages}


def _products_constants(width: int, values: int, dtype: torch.dtype) -> dict[str, int]:
    if dtype == torch.float32:
        blocks = {"BLOCK_K": FP32_BLOCK, "BLOCK_V": FP32_BLOCK, "num_warps": 8, "num_stages": 2}
    else:
        key = _block(width, 128)
        blocks = {"BLOCK_K": key, "BLOCK_V": _block(values, 64), "num_warps": 4, "num_stages": 2 if key == 128 else 3}
    return {"K": width, "V": values, **blocks}


def _gradients_constants(width: int, dtype: torch.dtype) -> dict[str, int]:
    # Triton 3.6 gives wrong gradients of g in blocks of 32 channels of bf16, without an error.
    return {"K": width, "BLOCK_K": FP32_BLOCK if dtype == torch.float32 else 64, "num_warps": 4, "num_stages": 1}


def _case(
    kernel: triton.JITFunction, constants: dict[str, int], name: str
) -> tuple[object, dict[str, str], dict[str, object], dict[str, int]]:
    options = {option: constants.pop(option) for option in ("num_warps", "num_stages")}
    wide = {"g", "through", "dthrough", "dself", "update", "decay", "sum", "product", "initial", "final", "dfinal"}
    wide |= {"dinitial", "dg"}
    types = {}
    for argument in kernel.arg_names:
        stem = argument.removesuffix("_ptr")
        if stem != argument:
            types[argument] = "*i32" if stem in {"documents", "kind"} else "*fp32" if stem in wide else f"*{name}"
        elif argument not in constants:
            types[argument] = "fp32" if argument == "scale" else "i32"
    return kernel, types, dict(constants), options
