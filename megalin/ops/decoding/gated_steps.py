"""Decoding steps of gated linear attention and HGRN2 in one kernel, between the input and the output projection.

The step of a scan (`decay_step`, `vector_decay_step`) with the activations, positions and gates around it. Where the
projection read x instead of SRMSNorm(x), the kernel applies the norm's scale r(x) to its parts: both are linear.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from megalin.ops.choices import LRPEForm
from megalin.ops.decoding.few_rows import scale_of
from megalin.ops.dispatch import backend as backends
from megalin.ops.dispatch.backend import Backend, Compiled
from megalin.ops.dispatch.dtypes import KERNEL_DTYPES, compute_dtype
from megalin.ops.dispatch.operands import check_operands, static
from megalin.ops.dispatch.self_test import BOUND, compare, few, sample
from megalin.ops.gates.forget_gates import forget_gates_reference
from megalin.ops.positions.silu_lrpe import silu_lrpe_reference
from megalin.ops.scans.fixed_decay_step import decay_step_reference
from megalin.ops.scans.vector_decay_step import vector_decay_step_reference

MAX_KEY_DIM = 512
QueryActivation = Literal["silu", "sigmoid"]


class GatedStep(NamedTuple):
    """Result of a gated decoding step."""

    product: Tensor
    """[B, H V], the output before its norm, times the gate, in the dtype of the projection."""
    squares: Tensor
    """[B, P] partial sums over H V of the squared output before the gate, at least fp32."""
    state: Tensor
    """[B, H, K, V], the next state."""


class NormedInput(NamedTuple):
    """Input of a projection that read it without its norm."""

    x: Tensor
    """[B, D]."""
    eps: float


def gated_decay_step(
    parts: Tensor,
    state: Tensor,
    slopes: Tensor | None,
    *,
    gate: Tensor | None,
    theta: Tensor | None = None,
    positions: Tensor,
    form: LRPEForm | None = None,
    unnormed: NormedInput | None = None,
    in_place: bool = False,
    backend: Backend = "auto",
) -> GatedStep:
    """One token of `decay_step` on LRPE(silu(q)), LRPE(silu(k)), v, and its product with a gate.

    Args:
        parts: [B, 3 or 4, H, V]: q, k, v, and a gate u.
        state: [B, H, K, V], at least fp32; K = 2 V with the cosine form, else V. The kernel may read it while the one
            launched just before it ends, which therefore must not write it.
        slopes: [H] or None, as in `decay_step`.
        gate: [B, H V]; None where parts has u.
        theta: [H, V] (cosine), [H, V/2] (rotation) or None, fp32.
        positions: [B] integers.
        unnormed: the input of the projection, whose norm scales all parts but not `gate`; None where it was normed.
        in_place: write the next state over `state` and return that tensor; the reference never does.
        backend: implementation to run; the compiled one has no backward.

    Raises:
        KernelError: an explicit backend that cannot run.
        OperandError: tensors with incompatible shapes, dtypes or devices.
    """
    operands: dict[str, tuple[Tensor | None, str]] = {"parts": (parts, "BPHV"), "state": (state, "BHKV")}
    operands |= {"slopes": (slopes, "H"), "gate": (gate, "BD")}
    operands |= {"theta": (theta, "HF"), "positions": (positions, "B int")}
    case = check_operands("gated_decay_step", operands, "PHKV")
    case = (*case, ("form", form), ("unnormed", 0 if unnormed is None else static(unnormed.x.shape[1])))
    assert parts.shape[1] == (4 if gate is None else 3), parts.shape
    tensors = [tensor for tensor in (parts, gate, unnormed.x if unnormed else None) if tensor is not None]
    unsupported = _unsupported(tensors, state, theta)
    if backends.choose("gated_decay_step", backend, parts.device.type, unsupported, case=case) == "reference":
        return gated_decay_step_reference(
            parts, state, slopes, gate=gate, theta=theta, positions=positions, form=form, unnormed=unnormed
        )
    return _decay_step(parts, state, slopes, gate, theta, positions, form, unnormed, in_place)


def gated_decay_step_reference(
    parts: Tensor,
    state: Tensor,
    slopes: Tensor | None,
    *,
    gate: Tensor | None,
    theta: Tensor | None = None,
    positions: Tensor,
    form: LRPEForm | None = None,
    unnormed: NormedInput | None = None,
) -> GatedStep:
    """`gated_decay_step` in plain PyTorch: tests the kernel and runs on CPUs."""
    q, k, v, *rest = silu_lrpe_reference(_normed(parts, unnormed)[:, None], theta, positions[:, None], form=form)
    output, state = decay_step_reference(q[:, 0], k[:, 0], v[:, 0], slopes, state)
    gate = rest[0].flatten(1) if gate is None else gate
    return GatedStep(output.flatten(1) * gate, _squares(output), state)


def gated_vector_step(
    parts: Tensor,
    state: Tensor,
    bound: Tensor,
    *,
    query_activation: QueryActivation,
    silu_value: bool,
    scale: float,
    unnormed: NormedInput | None = None,
    in_place: bool = False,
    backend: Backend = "auto",
) -> GatedStep:
    """One token of `vector_decay_step` with HGRN2's gates: q = act(q), k = 1 - f, f = b + (1 - b) sigmoid(l).

    Args:
        parts: [B, 3, H, V]: q, the logit l, and v, which goes through silu with `silu_value`.
        state: [B, H, V, V], at least fp32, read as in `gated_decay_step`.
        bound: b [H V] in [0, 1), at least fp32.
        scale: factor on the output.
        unnormed, in_place, backend: as in `gated_decay_step`.

    Returns:
        GatedStep, its product without a gate.

    Raises:
        KernelError: an explicit backend that cannot run.
        OperandError: tensors with incompatible shapes, dtypes or devices.
    """
    operands = {"parts": (parts, "BPHV"), "state": (state, "BHVV"), "bound": (bound, "D")}
    case = check_operands("gated_vector_step", operands, "HV")
    case = (*case, ("query_activation", query_activation), ("silu_value", silu_value))
    case = (*case, ("unnormed", 0 if unnormed is None else static(unnormed.x.shape[1])))
    unsupported = _unsupported([parts, *([] if unnormed is None else [unnormed.x])], state, bound)
    if backends.choose("gated_vector_step", backend, parts.device.type, unsupported, case=case) == "reference":
        return gated_vector_step_reference(
            parts,
            state,
            bound,
            query_activation=query_activation,
            silu_value=silu_value,
            scale=scale,
            unnormed=unnormed,
        )
    return _vector_step(parts, state, bound, query_activation, silu_value, scale, unnormed, in_place)


def gated_vector_step_reference(
    parts: Tensor,
    state: Tensor,
    bound: Tensor,
    *,
    query_activation: QueryActivation,
    silu_value: bool,
    scale: float,
    unnormed: NormedInput | None = None,
) -> GatedStep:
    """`gated_vector_step` in plain PyTorch: tests the kernel and runs on CPUs."""
    q, logit, v = _normed(parts, unnormed).unbind(1)  # [B, H, V]
    k, log_decay = (gate.view(q.shape) for gate in forget_gates_reference(logit.flatten(1), bound))
    q = functional.silu(q) if query_activation == "silu" else torch.sigmoid(q)
    v = functional.silu(v) if silu_value else v
    output, state = vector_decay_step_reference(q, k, v, log_decay, state, scale=scale)
    return GatedStep(output.flatten(1), _squares(output), state)


def _normed(parts: Tensor, unnormed: NormedInput | None) -> Tensor:
    """The parts [B, P, H, V] of the normed input."""
    if unnormed is None:
        return parts
    x = unnormed.x.to(compute_dtype(unnormed.x))
    scale = scale_of(x.square().sum(-1), x.shape[-1], unnormed.eps)
    return (parts * scale[:, None, None, None]).to(parts.dtype)


def _squares(output: Tensor) -> Tensor:
    """[B, 1] sums of the squares of an output [B, H, V]."""
    return output.to(compute_dtype(output)).square().sum((1, 2))[:, None]


def _decay_step(
    parts: Tensor,
    state: Tensor,
    slopes: Tensor | None,
    gate: Tensor | None,
    theta: Tensor | None,
    positions: Tensor,
    form: LRPEForm | None,
    unnormed: NormedInput | None,
    in_place: bool = False,
) -> GatedStep:
    """The kernel, of an fp32 state."""
    from megalin._triton.decoding import gated_steps as kernels

    parts = parts.contiguous()
    following = state if in_place else torch.empty_like(state)
    product, squares = kernels.fixed_step(
        parts,
        parts[:, 3].flatten(1) if gate is None else gate.contiguous(),
        None if unnormed is None else unnormed.x.contiguous(),
        None if theta is None else theta.contiguous(),
        positions.contiguous(),
        None if slopes is None else slopes.float().contiguous(),
        state,
        following,
        form=form,
        gate_scaled=gate is None,
        eps=0.0 if unnormed is None else unnormed.eps,
    )
    return GatedStep(product, squares, following)


def _vector_step(
    parts: Tensor,
    state: Tensor,
    bound: Tensor,
    query_activation: QueryActivation,
    silu_value: bool,
    scale: float,
    unnormed: NormedInput | None,
    in_place: bool = False,
) -> GatedStep:
    """The kernel, of an fp32 state."""
    from megalin._triton.decoding import gated_steps as kernels

    following = state if in_place else torch.empty_like(state)
    product, squares = kernels.vector_step(
        parts.contiguous(),
        bound.contiguous(),
        None if unnormed is None else unnormed.x.contiguous(),
        state,
        following,
        silu_query=query_activation == "silu",
        silu_value=silu_value,
        factor=scale,
        eps=0.0 if unnormed is None else unnormed.eps,
    )
    return GatedStep(product, squares, following)


def _unsupported(tensors: list[Tensor], state: Tensor, full_precision: Tensor | None) -> str:
    for tensor in tensors:
        if tensor.dtype not in KERNEL_DTYPES:
            return f"dtype {tensor.dtype}"
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (*tensors, state)):
        return "tensors that need gradients"
    if state.shape[2] > MAX_KEY_DIM:
        return f"keys of width {state.shape[2]}, above {MAX_KEY_DIM}"
    for tensor in [state] if full_precision is None else [state, full_precision]:
        if tensor.dtype != torch.float32:
            return f"a state or parameter of {tensor.dtype}"
    if not state.is_contiguous():  # a copy of it would be written just before the kernel
        return "a state that is not contiguous"
    return "an empty tensor" if tensors[0].numel() == 0 else ""


def _decay_self_test(backend: Compiled, device: str, case: Mapping[str, Any]) -> str:
    heads, key, value, form = few(case["H"]), case["K"], case["V"], case["form"]
    slopes = None if case["slopes"] is None else torch.linspace(0.0, 2.0, heads, device=device, dtype=case["slopes"])
    positions = torch.tensor([3, 4099], device=device, dtype=case["positions"])
    inputs = {
        "parts": sample(2, case["P"], heads, value, device=device, dtype=case["parts"]),
        "state": sample(2, heads, key, value, device=device, seed=2),
    }
    if case["gate"] is not None:
        inputs["gate"] = sample(2, heads * value, device=device, seed=4, dtype=case["gate"])
    if form is not None:
        inputs["theta"] = sample(heads, key // 2, device=device, seed=3).abs()

    def kernel(parts: Tensor, state: Tensor, *, gate: Any = None, theta: Any = None, unnormed: Any = None) -> GatedStep:
        return _decay_step(parts, state, slopes, gate, theta, positions, form, unnormed)

    def reference(parts: Tensor, state: Tensor, **options: Any) -> GatedStep:
        return gated_decay_step_reference(parts, state, slopes, **options, positions=positions, form=form)

    return _compare(kernel, partial(reference, gate=None), inputs, case)


def _vector_self_test(backend: Compiled, device: str, case: Mapping[str, Any]) -> str:
    heads, value = few(case["H"]), case["V"]
    activation, silu = case["query_activation"], case["silu_value"]
    inputs = {
        "parts": sample(2, 3, heads, value, device=device, dtype=case["parts"]),
        "state": sample(2, heads, value, value, device=device, seed=2),
        "bound": sample(heads * value, device=device, seed=3, dtype=case["bound"]).sigmoid(),
    }

    def kernel(parts: Tensor, state: Tensor, bound: Tensor, unnormed: NormedInput | None = None) -> GatedStep:
        return _vector_step(parts, state, bound, activation, silu, 0.5, unnormed)

    reference = partial(gated_vector_step_reference, query_activation=activation, silu_value=silu, scale=0.5)
    return _compare(kernel, reference, inputs, case)


def _compare(
    kernel: Callable[..., GatedStep],
    reference: Callable[..., GatedStep],
    inputs: Mapping[str, Tensor],
    case: Mapping[str, Any],
) -> str:
    """Error of a step of `inputs`, whose projection read an input without its norm if the call has one."""
    dtype, width = case["parts"], case["unnormed"]
    unnormed = [sample(2, width, device=inputs["state"].device.type, seed=1, dtype=dtype)] if width else []

    def run(step: Callable[..., GatedStep], tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        options: dict[str, Any] = dict(zip(inputs, tensors, strict=False))
        if width:
            options["unnormed"] = NormedInput(tensors[-1], 1e-3)
        product, squares, state = step(**options)
        return product, squares.sum(1), state

    bound = 1e-3 if dtype == torch.float32 else BOUND
    with torch.no_grad():
        return compare(
            lambda *x: run(kernel, x),
            lambda *x: run(reference, x),
            [*inputs.values(), *unnormed],
            bound=bound,
            differentiable=0,
        )


backends.register("gated_decay_step", ("triton",), _decay_self_test)
backends.register("gated_vector_step", ("triton",), _vector_self_test)
