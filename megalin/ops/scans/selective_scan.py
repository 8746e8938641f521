"""The selective scan of Mamba-1, whose decay is a function of a channel's time step and a state's rate.

    S_t[d, n] = exp(dt_t[d] A[d, n]) S_{t-1}[d, n] + dt_t[d] v_t[d] k_t[n],    o_t[d] = sum over n of q_t[n] S_t[d, n]

It is the vector-decay recurrence with H = D heads of K = N keys and one value, V = 1, which read the same q and k; it
is tested against the recurrent form of vector_decay.py and shares its step. Kernels never store the decays.
Exponents are sums of dt A over the tokens between, <= 0. Documents: as in fixed_decay.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from megalin.ops.dispatch import backend as backends
from megalin.ops.dispatch.backend import Backend, Compiled
from megalin.ops.dispatch.custom_op import contiguous, custom_op
from megalin.ops.dispatch.dtypes import KERNEL_DTYPES, compute_dtype
from megalin.ops.dispatch.operands import check_operands
from megalin.ops.dispatch.self_test import compare, sample
from megalin.ops.scans.chunks import chunk_documents, fold_states
from megalin.ops.scans.context_parallel import SequenceShard
from megalin.ops.scans.driver import Begun, Finished, Inputs, ScanOutput, fold, run_scan
from megalin.ops.scans.self_tests import TOKENS, compare_shards, differentiable, documents_of
from megalin.ops.scans.states import selected_state
from megalin.ops.scans.transition import SelectiveDecay
from megalin.ops.scans.vector_decay_step import vector_decay_step

MAX_STATES = 128
"""Most states a channel of the kernels."""


def selective_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    step: Tensor,
    rates: Tensor,
    *,
    initial_state: Tensor | None = None,
    shard: SequenceShard | None = None,
    document_ids: Tensor | None = None,
    state_gradient: bool = True,
    chunk_size: int = 16,
    backend: Backend = "auto",
) -> ScanOutput:
    """The recurrence above; q, k, v are C, B, x of Mamba.

    Args:
        q, k: [B, T, N], shared by all channels.
        v: [B, T, D].
        step: dt [B, T, D], >= 0, at least fp32.
        rates: A [D, N], <= 0, at least fp32.
        initial_state: [B, D, N]; None for zeros.
        shard: this rank's shard under context parallelism: the initial state then comes from the ranks before, and the
            returned state has no gradient; None for full sequences.
        document_ids: [B, T] integers; None if each sequence is one document.
        state_gradient: whether the returned state of a full sequence has a gradient; it costs time in compiled blocks.
        chunk_size: tokens a chunk of the reference, whose chunks run side by side, token by token; it changes the
            rounding only.
        backend: implementation to run; compiled ones take q, k, v of one dtype, fp32, bf16 or fp16, and N up to 128.

    Returns:
        ScanOutput with output [B, T, D] in the dtype of v, and state [B, D, N]. All arithmetic is in fp32 (fp64 for
        fp64 inputs).

    Raises:
        KernelError: an explicit backend that cannot run.
        OperandError: mismatched shapes, kinds or devices.

    Source: Mamba, algorithm 2, with the Euler step dt B of its code.
    """
    operands = {"v": (v, "BTD"), "q": (q, "BTN"), "k": (k, "BTN"), "step": (step, "BTD"), "rates": (rates, "DN")}
    extra = {"initial_state": (initial_state, "BDN"), "document_ids": (document_ids, "BT int")}
    case = check_operands("selective_scan", operands | extra, "DN")
    case = (*case, ("state_gradient", state_gradient))
    assert shard is None or initial_state is None, "initial_state and shard are exclusive"
    op, limit = "selective_scan", _unsupported(q, k, v)
    choice = backends.choose(op if shard is None else f"split_{op}", backend, v.device.type, limit, case=case)
    if shard is not None and choice == "reference":
        added, decays = (step * v)[..., None], step[..., None] * rates
        state = selected_state(k[:, :, None].expand(decays.shape), added, decays, document_ids=document_ids)
        initial_state, shard = fold(state, SelectiveDecay(step.sum(1), rates), shard)[..., 0], None
        case = (*case, ("initial_state", initial_state.dtype))
        choice = backends.choose(op, backend, v.device.type, limit, case=case)
    options: dict[str, Any] = {"initial_state": initial_state, "document_ids": document_ids}
    if choice == "reference":
        return selective_scan_reference(q, k, v, step, rates, chunk_size=chunk_size, **options)
    return _compiled_scan(q, k, v, step, rates, shard=shard, state_gradient=state_gradient, **options)


def _compiled_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    step: Tensor,
    rates: Tensor,
    *,
    document_ids: Tensor | None,
    initial_state: Tensor | None = None,
    shard: SequenceShard | None = None,
    state_gradient: bool = True,
) -> ScanOutput:
    """`selective_scan` by the kernels."""
    inputs = (*map(_rows, (q, k, v, step.float())), rates.float().contiguous(), document_ids)
    first = None if initial_state is None else initial_state.float()[..., None]
    output, state = run_scan(KERNELS, inputs, initial_state=first, shard=shard, state_gradient=state_gradient)
    return ScanOutput(output, state[..., 0])


def selective_scan_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    step: Tensor,
    rates: Tensor,
    *,
    initial_state: Tensor | None = None,
    document_ids: Tensor | None = None,
    chunk_size: int = 16,
) -> ScanOutput:
    """`selective_scan` in plain PyTorch; the CPU backend."""
    length, wide = v.shape[1], compute_dtype(v)
    chunk = min(chunk_size, length)
    dtype, rates = v.dtype, rates.to(wide)
    q, k, v, step = (_split_chunks(x.to(wide), chunk) for x in (q, k, v, step))  # [B, M, C, N or D]
    documents = chunk_documents(document_ids, length, chunk, v.device)  # [1 or B, M, C]
    added = (step * v)[..., None] * k[..., None, :]  # [B, M, C, D, N]
    restarts = (documents != torch.cat([documents[..., :1], documents[..., :-1]], dim=-1))[..., None, None]
    decay = torch.exp(step[..., None] * rates).masked_fill(restarts, 0.0)
    states, rows = torch.zeros_like(added[:, :, 0]), []
    for token in range(chunk):
        states = decay[:, :, token] * states + added[:, :, token]
        rows.append((states * q[:, :, token, None]).sum(-1))  # [B, M, D]

    # Document of the state entering chunk m (that of the previous chunk's last token), and of the final state.
    leaving = torch.cat([documents[:, :1, 0], documents[..., -1]], dim=-1)  # [1 or B, M + 1]
    through = torch.exp(step.sum(2)[..., None] * rates)
    through = through.masked_fill((leaving[:, 1:] != leaving[:, :-1])[..., None, None], 0.0)
    folded = fold_states(through.transpose(1, 2), states.transpose(1, 2)[..., None], _keys(initial_state))
    entering = folded[:, :, :-1, :, 0].transpose(1, 2)  # [B, M, D, N]
    from_start = torch.exp(step.cumsum(2)[..., None] * rates)  # [B, M, C, D, N]
    from_start = from_start.masked_fill((documents != leaving[:, :-1, None])[..., None, None], 0.0)
    carried = (from_start * entering[:, :, None] * q[..., None, :]).sum(-1)
    output = (torch.stack(rows, dim=2) + carried).flatten(1, 2)[:, :length]
    return ScanOutput(output.to(dtype), folded[:, :, -1, :, 0].clone())


def selective_step(
    q: Tensor, k: Tensor, v: Tensor, step: Tensor, rates: Tensor, state: Tensor, *, in_place: bool = False
) -> ScanOutput:
    """One decoding step: q, k [B, N], v, step [B, D], rates [D, N], state [B, D, N] in at least fp32; `in_place` as in
    `vector_decay_step`. Raises OperandError."""
    operands = {"v": (v, "BD"), "q": (q, "BN"), "k": (k, "BN"), "step": (step, "BD"), "rates": (rates, "DN")}
    check_operands("selective_step", operands | {"state": (state, "BDN")})
    added, decay = (step * v)[..., None].to(v.dtype), step[..., None] * rates
    output, following = vector_decay_step(q[:, None], k[:, None], added, decay, state[..., None], in_place=in_place)
    return ScanOutput(output[..., 0], following[..., 0])


def _split_chunks(x: Tensor, chunk: int) -> Tensor:
    """[B, T, W] -> [B, M, C, W], zero-padded at the end: a time step of zero changes no state."""
    return torch.nn.functional.pad(x, (0, 0, 0, -x.shape[1] % chunk)).unflatten(1, (-1, chunk))


def _keys(state: Tensor | None) -> Tensor | None:
    """[B, D, N] as a state [B, H, K, V] of one value."""
    return None if state is None else state[..., None]


def _rows(x: Tensor) -> Tensor:
    """`x`, or a copy if its last dimension is not contiguous."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _fake_begin(rows: Tensor, columns: Tensor, step: Tensor, rates: Tensor, _: Any, *flags: bool) -> list[Tensor]:
    from megalin._triton.scans import selective_scan as kernels

    total = flags[1]
    state = (*columns.shape[::2], rates.shape[1], 1)
    return [rates.new_empty(state if total else 0), *kernels.scan_of(columns, rates).empty_sums(rates, total=total)]


@custom_op("selective_scan_begin", _fake_begin)
def _begin(
    rows: Tensor, columns: Tensor, step: Tensor, rates: Tensor, documents: Tensor | None, reverse: bool, total: bool
) -> list[Tensor]:
    """The state that all tokens add, from k and v, or if `reverse` the gradient of the entering state, from q and the
    output's gradient, empty unless `total`; and Sums for the second phase."""
    from megalin._triton.scans import selective_scan, selective_scan_gradient

    kernels = selective_scan_gradient if reverse else selective_scan
    state, sums = kernels.begin(rows, _rows(columns), step, rates, contiguous(documents), total=total)
    return [state, *sums]


def _fake_finish(q: Tensor, k: Tensor, v: Tensor, step: Tensor, rates: Tensor, *_: Any) -> tuple[Tensor, ...]:
    from megalin._triton.scans import selective_scan as kernels

    state = rates.new_empty(*v.shape[::2], rates.shape[1], 1)
    return v.new_empty(v.shape), state, rates.new_empty(kernels.saved_shape(v, rates))


@custom_op("selective_scan_finish", _fake_finish)
def _finish(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    step: Tensor,
    rates: Tensor,
    documents: Tensor | None,
    entering: Tensor | None,
    sums: list[Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """Output, final state, and the states entering segments."""
    from megalin._triton.scans import selective_scan as kernels

    documents, entering = contiguous(documents), contiguous(entering)
    return kernels.finish(q, k, v, step, rates, documents, entering, kernels.Sums(*sums))


def _fake_finish_backward(
    d_output: Tensor, d_leaving: Tensor | None, q: Tensor, k: Tensor, v: Tensor, step: Tensor, rates: Tensor, *_: Any
) -> list[Tensor]:
    d_entering = rates.new_empty(*v.shape[::2], rates.shape[1], 1)
    return [*(x.new_empty(x.shape) for x in (q, k, v, step, rates)), d_entering]


@custom_op("selective_scan_finish_backward", _fake_finish_backward)
def _finish_backward(
    d_output: Tensor,
    d_leaving: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    step: Tensor,
    rates: Tensor,
    documents: Tensor | None,
    entering: Tensor | None,
    saved: Tensor,
    sums: list[Tensor],
) -> list[Tensor]:
    from megalin._triton.scans import selective_scan, selective_scan_gradient

    d_leaving, documents, entering = (contiguous(x) for x in (d_leaving, documents, entering))
    inputs = (_rows(d_output), d_leaving, q, k, v, step, rates, documents, entering, saved)
    return list(selective_scan_gradient.finish(*inputs, selective_scan.Sums(*sums)))


class _Kernels:
    """`ScanKernels` of the inputs q, k [B, T, N], v, step [B, T, D], rates [D, N] and document_ids [B, T], the last
    dimensions contiguous, step and rates in fp32. States are [B, D, N, 1]."""

    def begin(self, inputs: Inputs, *, exchange: bool) -> Begun:
        _, k, v, step, rates, documents = inputs
        state, *sums = _begin(k, v, step, rates, documents, False, exchange)
        return Begun((state, SelectiveDecay(sums[1].sum(1), rates)) if exchange else None, sums)

    def finish(self, inputs: Inputs, entering: Tensor | None, begun: Begun, *, keep: bool) -> Finished:
        output, state, saved = _finish(*inputs, entering, begun.handed)
        return Finished(output, state, [entering, saved])

    def begin_backward(self, d_output: Tensor, inputs: Inputs, saved: Inputs, *, exchange: bool) -> Begun:
        q, _, _, step, rates, documents = inputs
        gradient, *sums = _begin(q, d_output, step, rates, documents, True, exchange)
        return Begun((gradient, SelectiveDecay(sums[1].sum(1), rates)) if exchange else None, sums)

    def finish_backward(
        self, d_output: Tensor, d_leaving: Tensor | None, inputs: Inputs, saved: Inputs, begun: Begun
    ) -> tuple[list[Tensor | None], Tensor]:
        *gradients, d_entering = _finish_backward(d_output, d_leaving, *inputs, *saved, begun.handed)
        return [*gradients, None], d_entering


KERNELS = _Kernels()


def _unsupported(q: Tensor, k: Tensor, v: Tensor) -> str:
    """Reason why no kernel takes these inputs; empty if one does."""
    if not q.dtype == k.dtype == v.dtype or v.dtype not in KERNEL_DTYPES:
        return f"q, k, v of {q.dtype}, {k.dtype}, {v.dtype}"
    if q.shape[-1] > MAX_STATES:
        return f"{q.shape[-1]} states a channel, above {MAX_STATES}"
    return "an empty tensor" if 0 in (q.numel(), v.numel()) else ""


def _samples(case: Mapping[str, Any], length: int, strength: float, device: str) -> list[Tensor]:
    """q, k, v, step and rates, with steps of about `strength`."""
    wide, states = case["D"], case["N"]
    sizes: dict[str, tuple[int, ...]] = {"q": (1, length, states), "k": (1, length, states), "v": (1, length, wide)}
    sizes |= {"step": (1, length, wide), "rates": (wide, states)}
    q, k, v, step, rates = (sample(*size, device=device, seed=seed) for seed, size in enumerate(sizes.values()))
    inputs = (q, k, v, strength * step.abs(), -rates.abs())
    return [x.to(case[name]) for name, x in zip(sizes, inputs, strict=True)]


def _self_test(backend: Compiled, device: str, case: Mapping[str, Any]) -> str:
    """Several segments."""
    documents = documents_of(case, 144, device)
    inputs = _samples(case, 144, 0.3, device)
    if (dtype := case["initial_state"]) is not None:
        inputs.append(sample(1, case["D"], case["N"], device=device, seed=5, dtype=dtype))

    def kernel(q: Tensor, k: Tensor, v: Tensor, step: Tensor, rates: Tensor, first: Tensor | None = None) -> ScanOutput:
        options: dict[str, Any] = {"initial_state": first, "document_ids": documents}
        return _compiled_scan(q, k, v, step, rates, **options, state_gradient=case["state_gradient"])

    def reference(
        q: Tensor, k: Tensor, v: Tensor, step: Tensor, rates: Tensor, first: Tensor | None = None
    ) -> ScanOutput:
        return selective_scan_reference(q, k, v, step, rates, initial_state=first, document_ids=documents)

    return compare(kernel, reference, inputs, differentiable=differentiable(case))


def _shards_self_test(backend: Compiled, device: str, case: Mapping[str, Any]) -> str:
    """Without a gradient of the rates: a shard has its part of every other input."""
    *inputs, rates = _samples(case, TOKENS, 0.03, device)
    return compare_shards(
        lambda shard, documents, q, k, v, step: _compiled_scan(
            q, k, v, step, rates, document_ids=documents, shard=shard
        ),
        lambda documents, q, k, v, step: selective_scan_reference(q, k, v, step, rates, document_ids=documents),
        inputs,
        case,
    )


backends.register("selective_scan", ("triton",), _self_test)
backends.register("split_selective_scan", ("triton",), _shards_self_test)
