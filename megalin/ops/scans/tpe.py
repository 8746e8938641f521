"""TPE, cosFormer2's input layer: each channel becomes a sum of its past under many exponential decays.

    H_t[c, k] = lambda_k H_{t-1}[c, k] + B[c, k] x_t[c],    y_t[c] = sum_k H_t[c, k]

`tpe_reference` is the chunkwise form; it is tested against `tpe_recurrent`. Every exponent is a distance times
log lambda, hence <= 0. Documents: as in fixed_decay.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from megalin.ops.dispatch import backend as backends
from megalin.ops.dispatch.backend import Backend, Compiled
from megalin.ops.dispatch.custom_op import custom_op
from megalin.ops.dispatch.dtypes import KERNEL_DTYPES, compute_dtype, without_autocast
from megalin.ops.dispatch.operands import Case, check_operands
from megalin.ops.dispatch.self_test import compare, sample
from megalin.ops.scans.chunks import chunk_documents, split_chunks
from megalin.ops.scans.self_tests import documents_of

MAX_DECAYS = 256


class TPEOutput(NamedTuple):
    """Outputs [B, T, D] in the dtype of x, and the state [B, D, E] after the last token in at least fp32."""

    output: Tensor
    state: Tensor


def tpe(
    x: Tensor,
    coefficients: Tensor,
    log_decay: Tensor,
    *,
    state: Tensor | None = None,
    document_ids: Tensor | None = None,
    chunk_size: int = 64,
    backend: Backend = "auto",
) -> TPEOutput:
    """The recurrence above.

    Args:
        x: [B, T, D].
        coefficients: B [D, E].
        log_decay: log lambda [E], <= 0, at least fp32.
        state: [B, D, E] before the first token; None for zeros.
        document_ids: [B, T] integers; None if each sequence is one document.
        chunk_size: of the reference, kernels have their own; the result does not depend on it beyond rounding.
        backend: implementation to run; compiled ones take x in fp32, bf16 or fp16, the rest in fp32, and E up to 256.

    Returns:
        TPEOutput; everything is computed in at least fp32.

    Raises:
        KernelError: an explicit backend that cannot run.
        OperandError: mismatched shapes, kinds or devices.
    """
    case = _check("tpe", (x, "BTD"), coefficients, log_decay, state, document_ids)
    choice = backends.choose("tpe", backend, x.device.type, _unsupported(x, coefficients, log_decay), case=case)
    if choice == "reference":
        return tpe_reference(x, coefficients, log_decay, state=state, document_ids=document_ids, chunk_size=chunk_size)
    return _compiled_tpe(x, coefficients, log_decay, state, document_ids)


@without_autocast
def _compiled_tpe(
    x: Tensor, coefficients: Tensor, log_decay: Tensor, state: Tensor | None, document_ids: Tensor | None
) -> TPEOutput:
    """`tpe` by the kernels."""
    starts = torch.zeros(x.shape[0], x.shape[1] + 1, dtype=torch.uint8, device=x.device)
    if document_ids is not None:
        starts[:, 1:-1] = document_ids[:, 1:] != document_ids[:, :-1]
    # An initial state is rare; its contribution is added before the output is rounded.
    output, last = _scan(x.contiguous(), coefficients.contiguous(), log_decay.contiguous(), starts, state is not None)
    last = coefficients * last
    if state is not None:
        index = torch.arange(1, x.shape[1] + 1, device=x.device)
        powers = _powers(log_decay, index) * (starts[:, :-1].cumsum(1) == 0)[..., None]  # [B, T, E]
        output = output + powers @ state.float().mT
        last = last + powers[:, -1:] * state.float()
    return TPEOutput(output.to(x.dtype), last)


@without_autocast
def tpe_reference(
    x: Tensor,
    coefficients: Tensor,
    log_decay: Tensor,
    *,
    state: Tensor | None = None,
    document_ids: Tensor | None = None,
    chunk_size: int = 64,
) -> TPEOutput:
    """`tpe` in plain PyTorch, in chunks of C tokens: a window of C taps inside a chunk, states only between chunks.

    States are stored once per chunk, so memory is E / C copies of x, not E. T need not be a multiple of C.
    """
    length, wide = x.shape[1], compute_dtype(x)
    chunk = min(chunk_size, length)
    coefficients, log_decay = coefficients.to(wide), log_decay.to(wide)
    u = split_chunks(x.to(wide)[:, :, None], chunk)[:, 0]  # [B, N, C, D]
    documents = chunk_documents(document_ids, length, chunk, x.device)  # [1 or B, N, C]
    index = torch.arange(chunk, device=x.device)
    # Tokens before the start of chunk i, i = 0..N: the last chunk ends with the last real token, not with the padding.
    starts = (torch.arange(u.shape[1] + 1, device=x.device) * chunk).clamp(max=length)
    ends = starts[1:, None] - starts[:-1, None] - 1  # [N, 1] index of each chunk's last real token
    leaving = torch.cat([documents[:, :1, 0], documents[..., -1]], dim=1)  # [1 or B, N + 1] document of each state

    taps = coefficients @ _powers(log_decay, index).mT  # [D, C]
    local = _window(u, taps, documents)

    kept = (documents == leaving[:, 1:, None])[..., None]  # [1 or B, N, C, 1]
    to_end = _powers(log_decay, (ends - index).clamp(min=0)) * kept  # [1 or B, N, C, E]
    update = (to_end.mT @ u) * coefficients.mT  # [B, N, E, D]
    first = torch.zeros_like(update[:, 0]) if state is None else state.to(wide).mT
    sources = torch.cat([first[:, None], update], dim=1).transpose(1, 2)  # [B, E, N + 1, D]
    distance = starts[:, None] - starts
    flowing = (leaving[:, :, None] == leaving[:, None, :]).tril()[:, None]  # [1 or B, 1, N + 1, N + 1]
    flows = _powers(log_decay, distance.clamp(min=0)).permute(2, 0, 1) * flowing  # [1 or B, E, N + 1, N + 1]
    states = (flows @ sources).transpose(1, 2)  # [B, N + 1, E, D]: entering chunk i; the last one leaves the sequence

    seen = (documents == leaving[:, :-1, None])[..., None]
    carried = (_powers(log_decay, index + 1) * seen) @ states[:, :-1]  # [B, N, C, D]
    output = (local + carried).flatten(1, 2)[:, :length]
    return TPEOutput(output.to(x.dtype), states[:, -1].mT.contiguous())


def tpe_step(x: Tensor, coefficients: Tensor, log_decay: Tensor, state: Tensor) -> TPEOutput:
    """One token of the recurrence: x [B, D], state [B, D, E] in at least fp32; output [B, D] in the dtype of x.

    Raises:
        OperandError: mismatched shapes, kinds or devices.
    """
    _check("tpe_step", (x, "BD"), coefficients, log_decay, state, None)
    wide = state.dtype
    state = state * torch.exp(log_decay.to(wide)) + coefficients.to(wide) * x.to(wide)[..., None]
    return TPEOutput(state.sum(-1).to(x.dtype), state)


def tpe_recurrent(
    x: Tensor,
    coefficients: Tensor,
    log_decay: Tensor,
    *,
    state: Tensor | None = None,
    document_ids: Tensor | None = None,
) -> TPEOutput:
    """The recurrence token by token; arguments and result as `tpe`."""
    memory = x.new_zeros(x.shape[0], *coefficients.shape, dtype=compute_dtype(x))
    if state is not None:
        memory = memory + state
    outputs = []
    for t in range(x.shape[1]):
        if document_ids is not None and t > 0:
            memory = memory.masked_fill((document_ids[:, t] != document_ids[:, t - 1])[:, None, None], 0.0)
        output, memory = tpe_step(x[:, t], coefficients, log_decay, memory)
        outputs.append(output)
    return TPEOutput(torch.stack(outputs, dim=1), memory)


def tpe_flops(*, hidden_size: int, num_decays: int) -> int:
    """Forward FLOPs per token: 4 D E, the cost of the recurrence, as counted in the paper.

    The chunkwise form costs as much for its state: 2 D E to form it, 2 D E to read it. Its window inside a chunk, its
    taps and the states between chunks are artefacts of this implementation and are not counted.
    """
    return 4 * hidden_size * num_decays


def _powers(log_decay: Tensor, distance: Tensor) -> Tensor:
    """lambda_k^n for n >= 0 in `distance` [...]; [..., E]."""
    return torch.exp(distance[..., None] * log_decay)


def _window(u: Tensor, taps: Tensor, documents: Tensor) -> Tensor:
    """y_t = sum over lags i of taps_i u_{t-i}, inside the chunk and t's document; [B, N, C, D].

    Lag by lag, so that autograd saves views of `u` and masks; a matrix per channel and chunk would save C copies of it.
    """
    total = u * taps[:, 0]
    for lag in range(1, u.shape[2]):
        other = (documents[..., lag:] != documents[..., :-lag])[..., None]
        term = (u[:, :, :-lag] * taps[:, lag]).masked_fill(other, 0.0)
        total = total + functional.pad(term, (0, 0, lag, 0))
    return total


def _check(
    op: str,
    x: tuple[Tensor, str],
    coefficients: Tensor,
    log_decay: Tensor,
    state: Tensor | None,
    document_ids: Tensor | None,
) -> Case:
    operands = {"x": x, "coefficients": (coefficients, "DE"), "log_decay": (log_decay, "E")}
    return check_operands(op, operands | {"state": (state, "BDE"), "document_ids": (document_ids, "BT int")}, "DE")


def _unsupported(x: Tensor, coefficients: Tensor, log_decay: Tensor) -> str:
    if x.dtype not in KERNEL_DTYPES or not coefficients.dtype == log_decay.dtype == torch.float32:
        return f"dtypes {x.dtype}, {coefficients.dtype} and {log_decay.dtype}"
    if len(log_decay) > MAX_DECAYS:
        return f"{len(log_decay)} decays, above {MAX_DECAYS}"
    return "an empty tensor" if x.numel() == 0 else ""


def _fake_scan(x: Tensor, coefficients: Tensor, log_decay: Any, starts: Any, wide: bool) -> tuple[Tensor, Tensor]:
    state = coefficients.new_empty(x.shape[0], *coefficients.shape)
    return torch.empty_like(x, dtype=torch.float32 if wide else x.dtype), state


@custom_op("tpe", _fake_scan)
def _scan(x: Tensor, coefficients: Tensor, log_decay: Tensor, starts: Tensor, wide: bool) -> tuple[Tensor, Tensor]:
    """Returns y, in fp32 if `wide`, and H / B after the last token, both from a zero state."""
    from megalin._triton.scans import tpe as kernels

    y = torch.empty_like(x, dtype=torch.float32 if wide else x.dtype)
    return y, kernels.forward(x, coefficients, log_decay, starts, y)


@custom_op("tpe_backward", lambda dy, d_last, *inputs: tuple(torch.empty_like(x) for x in inputs[:3]))
def _backward(
    dy: Tensor, d_last: Tensor | None, x: Tensor, coefficients: Tensor, log_decay: Tensor, starts: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    from megalin._triton.scans import tpe as kernels
    from megalin._triton.scans import tpe_gradient

    dy, dx = dy.contiguous(), torch.empty_like(x, dtype=x.dtype if d_last is None else torch.float32)
    kernels.backward_input(dy, coefficients, log_decay, starts, dx)
    d_coefficients, d_slope, slope = tpe_gradient.backward_parameters(dy, x, log_decay, starts)
    d_log_decay = (coefficients * d_slope).sum(0)  # fp64: the sum over channels cancels to a large part
    if d_last is not None:
        d_log_decay += (d_last * slope).sum((0, 1))
        later = starts[:, 1:].flip(1).cumsum(1).flip(1)  # documents that start after each token
        index = torch.arange(x.shape[1] - 1, -1, -1, device=x.device)
        dx += (_powers(log_decay, index) * (later == 0)[..., None]) @ d_last.mT
    return dx.to(x.dtype), d_coefficients.float(), d_log_decay.float()


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:4])


def _differentiate(ctx: Any, dy: Tensor | None, d_last: Tensor | None) -> tuple[Tensor | None, ...]:
    x, *others = ctx.saved_tensors
    return *_backward(torch.zeros_like(x) if dy is None else dy, d_last, x, *others), None, None


torch.library.register_autograd(_scan, _differentiate, setup_context=_save)


def _self_test(backend: Compiled, device: str, case: Mapping[str, Any]) -> str:
    """Several segments."""
    length, wide, decays = 144, case["D"], case["E"]
    documents = documents_of(case, length, device)
    sizes = {"x": (1, length, wide), "coefficients": (wide, decays), "state": (1, wide, decays)}
    inputs = [
        sample(*size, device=device, seed=seed, dtype=case[name])
        for seed, (name, size) in enumerate(sizes.items())
        if case[name] is not None
    ]
    inputs.insert(2, -torch.logspace(-3, 0.5, decays, device=device, dtype=case["log_decay"]))

    def kernel(x: Tensor, coefficients: Tensor, log_decay: Tensor, state: Tensor | None = None) -> TPEOutput:
        return _compiled_tpe(x, coefficients, log_decay, state, documents)

    def reference(x: Tensor, coefficients: Tensor, log_decay: Tensor, state: Tensor | None = None) -> TPEOutput:
        return tpe_reference(x, coefficients, log_decay, state=state, document_ids=documents)

    return compare(kernel, reference, inputs, differentiable=1)


backends.register("tpe", ("triton",), _self_test)
