"""States of a fixed-decay scan with LRPE across segments, each in positions counted from its own origin.

Scores depend only on differences of positions, so any origin is valid if queries, keys and states use the same one.
Counted from the start of a long sequence, the gradient of a frequency is a sum of large terms, position times torque,
that cancel: its rounding error grows with the length, and in bf16 soon exceeds the result. Counted from the middle of a
short segment it does not; a state is then rotated by the angle between the origins as it enters the next segment:

    E_0 = initial,    E_{c+1} = R(L theta) (exp(-s L) E_c + U_c)

with U_c the state that segment c of L tokens adds, in its own positions (`decay_state`), E_c the state entering it, and
R(a): (x, y) -> (x cos a + y sin a, y cos a - x sin a) on the two rows of a state that belong to one frequency.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megalin.errors import OperandError
from megalin.ops.choices import LRPEForm
from megalin.ops.dispatch import backend as backends
from megalin.ops.dispatch.backend import Backend, Compiled
from megalin.ops.dispatch.custom_op import custom_op
from megalin.ops.dispatch.operands import check_one_dtype, check_operands
from megalin.ops.dispatch.self_test import compare, few, sample
from megalin.ops.positions.encodings import check_pairs


class SegmentStates(NamedTuple):
    """States entering each segment of a sequence and leaving the last, the latter in the next segment's positions."""

    entering: Tensor
    """[B, N, H, K, V]."""
    leaving: Tensor
    """[B, H, K, V]."""


def enter_segments(
    added: Tensor,
    theta: Tensor,
    slopes: Tensor,
    *,
    form: LRPEForm,
    length: int,
    initial: Tensor | None = None,
    document_ids: Tensor | None = None,
    backend: Backend = "auto",
) -> SegmentStates:
    """Computes the states E_c above; a state continues into the next segment if its document does.

    Args:
        added: U [B, N, H, K, V], each in its segment's positions, in at least fp32; K is the key dim after LRPE.
        theta: [H, K/2] angular frequencies in radians a token, at least fp32.
        slopes: s [H], >= 0 in nats a token, at least fp32 (a buffer: it gets no gradient).
        form: layout of a frequency's two key channels, as written by `silu_lrpe`.
        length: L, tokens a segment.
        initial: E_0 [B, H, K, V] in the dtype of `added` and the first segment's positions; None for zeros.
        document_ids: [B, N L] integers, non-decreasing; None when each sequence is one document.
        backend: implementation to run; the compiled one takes fp32.

    Returns:
        SegmentStates in the dtype of `added`. `leaving` belongs to the last token's document.

    Raises:
        KernelError: an explicit backend that cannot run.
        OperandError: tensors with incompatible shapes, dtypes or devices.
    """
    operands: dict[str, tuple[Tensor | None, str]] = {"added": (added, "BNHKV"), "theta": (theta, "HF")}
    operands |= {"slopes": (slopes, "H"), "initial": (initial, "BHKV"), "document_ids": (document_ids, "BT int")}
    case = (*check_operands("enter_segments", operands, "HKV"), ("form", form))
    check_pairs("enter_segments", theta, added.shape[3])
    if initial is not None:
        check_one_dtype("enter_segments", added=added, initial=initial)
    tokens = added.shape[1] * length
    if document_ids is not None and document_ids.shape[1] != tokens:
        raise OperandError(
            f"enter_segments: document_ids has {document_ids.shape[1]} tokens per sequence, but {added.shape[1]} "
            f"segments of {length} have {tokens}; they must be equal"
        )
    decay, continues = _carry_factors(added, slopes, length, document_ids)
    angle = _angle(theta, length, added.dtype)
    choice = backends.choose("enter_segments", backend, added.device.type, _unsupported(added), case=case)
    if choice == "reference":
        return enter_segments_reference(added, initial, angle, decay, continues, form=form)
    entering, leaving = _enter(added, initial, angle.contiguous(), decay, continues, form)
    return SegmentStates(entering, leaving)


def enter_segments_reference(
    added: Tensor, initial: Tensor | None, angle: Tensor, decay: Tensor, continues: Tensor, *, form: LRPEForm
) -> SegmentStates:
    """Reference of `enter_segments` in plain PyTorch: `angle` [H, K/2] between two origins; `decay` [B, N, H] and
    `continues` [B, N], the factors of a segment's E and U."""
    state = torch.zeros_like(added[:, 0]) if initial is None else initial
    entering = []
    for c in range(added.shape[1]):
        entering.append(state)
        state = decay[:, c, :, None, None] * state + continues[:, c, None, None, None] * added[:, c]
        state = _rotated(state, angle, form)
    return SegmentStates(torch.stack(entering, dim=1), state)


def move_origin(state: Tensor, theta: Tensor, tokens: int, *, form: LRPEForm) -> Tensor:
    """Moves the origin of a state's positions `tokens` later, or earlier if negative: R(tokens theta) S, [B, H, K, V].

    theta [H, K/2] in radians a token, and `form`, as in `enter_segments`.

    Raises:
        OperandError: tensors with incompatible shapes, dtypes or devices.
    """
    check_operands("move_origin", {"state": (state, "BHKV"), "theta": (theta, "HF")})
    check_pairs("move_origin", theta, state.shape[2])
    return _rotated(state, _angle(theta, tokens, state.dtype), form)


def _angle(theta: Tensor, tokens: int, dtype: torch.dtype) -> Tensor:
    """Angle tokens theta modulo 2 pi, reduced in fp64 so that long distances lose no precision."""
    return (torch.remainder(theta.double() * tokens + math.pi, 2.0 * math.pi) - math.pi).to(dtype)


def _rotated(state: Tensor, angle: Tensor, form: LRPEForm) -> Tensor:
    """Rotates states [..., H, K, V] by R(angle [H, K/2])."""
    sizes, pair = ((-1, 2), -2) if form == "rotation" else ((2, -1), -3)
    x, y = state.unflatten(-2, sizes).unbind(pair)
    cos, sin = angle.cos()[..., None], angle.sin()[..., None]
    return torch.stack([x * cos + y * sin, y * cos - x * sin], dim=pair).flatten(-3, -2)


def _carry_factors(added: Tensor, slopes: Tensor, length: int, document_ids: Tensor | None) -> tuple[Tensor, Tensor]:
    """Factors of a segment's entering state [B, N, H] and of its added state [B, N] in the next segment's state."""
    batch, segments, heads = added.shape[:3]
    continues = added.new_ones(batch, segments)
    decay = torch.exp(-length * slopes.to(added.dtype)).expand(batch, segments, heads)
    if document_ids is not None:
        ids = document_ids.unflatten(1, (segments, length))
        starts, ends = ids[..., 0], ids[..., -1]
        continues[:, :-1] = (ends[:, :-1] == starts[:, 1:]).to(added.dtype)
        decay = decay * (continues * (starts == ends))[..., None]
    return decay.contiguous(), continues


def _unsupported(added: Tensor) -> str:
    if added.dtype != torch.float32:
        return f"states of {added.dtype}"
    return "an empty tensor" if added.numel() == 0 else ""


@custom_op(
    "enter_segments",
    lambda added, *_: (added.new_empty(added.shape), added.new_empty(added.shape[0], *added.shape[2:])),
)
def _enter(
    added: Tensor, initial: Tensor | None, angle: Tensor, decay: Tensor, continues: Tensor, form: str
) -> tuple[Tensor, Tensor]:
    from megalin._triton.positions import lrpe_states as kernels

    first = None if initial is None else initial.contiguous()
    return kernels.forward(added.contiguous(), first, angle, decay, continues, rotation=form == "rotation")


def _fake_backward(_d_entering: Tensor, _d_leaving: Tensor, *operands: Any) -> tuple[Tensor, ...]:
    return tuple(tensor.new_empty(tensor.shape) for tensor in operands[:3])


@custom_op("enter_segments_backward", _fake_backward)
def _backward(
    d_entering: Tensor,
    d_leaving: Tensor,
    entering: Tensor,
    leaving: Tensor,
    angle: Tensor,
    decay: Tensor,
    continues: Tensor,
    form: str,
) -> tuple[Tensor, Tensor, Tensor]:
    from megalin._triton.positions import lrpe_states as kernels

    gradients = d_entering.contiguous(), d_leaving.contiguous()
    return kernels.backward(*gradients, entering, leaving, angle, decay, continues, rotation=form == "rotation")


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _, initial, angle, decay, continues, ctx.form = inputs
    ctx.initial = initial is not None
    ctx.save_for_backward(*output, angle, decay, continues)


def _differentiate(ctx: Any, d_entering: Tensor, d_leaving: Tensor) -> tuple[Tensor | None, ...]:
    d_added, d_initial, d_angle = _backward(d_entering, d_leaving, *ctx.saved_tensors, ctx.form)
    return d_added, d_initial if ctx.initial else None, d_angle, None, None, None


torch.library.register_autograd(_enter, _differentiate, setup_context=_save)


def _self_test(backend: Compiled, device: str, case: Mapping[str, Any]) -> str:
    """Five segments; no state continues into the third."""
    heads, key, value, form = few(case["H"]), case["K"], case["V"], case["form"]
    decay = torch.tensor([0.9, 0.0, 0.5, 1.0, 0.2], device=device)[None, :, None].repeat(2, 1, heads)
    continues = torch.tensor([1.0, 0.0, 1.0, 1.0, 1.0], device=device).repeat(2, 1)
    inputs = [sample(2, 5, heads, key, value, device=device), sample(heads, key // 2, device=device, seed=2)]
    if case["initial"] is not None:
        inputs.append(sample(2, heads, key, value, device=device, seed=1))

    def kernel(added: Tensor, angle: Tensor, initial: Tensor | None = None) -> tuple[Tensor, ...]:
        return _enter(added, initial, angle, decay, continues, form)

    def reference(added: Tensor, angle: Tensor, initial: Tensor | None = None) -> tuple[Tensor, ...]:
        return enter_segments_reference(added, initial, angle, decay, continues, form=form)

    return compare(kernel, reference, inputs)


backends.register("enter_segments", ("triton",), _self_test)
