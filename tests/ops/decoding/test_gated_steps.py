"""Gated decoding steps: the kernels in the interpreter against the ops that they join, in fp64."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from megalin.errors import KernelError, OperandError
from megalin.ops.decoding.gated_steps import NormedInput, gated_decay_step, gated_vector_step
from megalin.ops.norms.srmsnorm import srmsnorm_reference
from megalin.ops.positions.encodings import lrpe_cosine, lrpe_rotation
from megalin.ops.scans.fixed_decay_step import decay_step_reference
from megalin.ops.scans.vector_decay_step import vector_decay_step_reference

BATCH, HEADS, HEAD, WIDTH, EPS = 2, 3, 20, 36, 1e-2
POSITIONS = torch.tensor([5, 1030])
SLOPES = torch.tensor([0.0, 0.3, 4.0]).repeat_interleave(2)[::2]  # strided
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 8e-3}


def assert_close(found, output, gate, state, dtype) -> None:
    """The product, the squares before the gate, and the state, which is fp32 in both."""
    for actual, truth in (
        (found.product, (output.flatten(1) * gate)),
        (found.squares.sum(1), output.flatten(1).square().sum(1)),
        (found.state, state),
    ):
        assert ((actual.double() - truth).norm() / truth.norm()).item() < BOUNDS[dtype]
    assert found.product.dtype == dtype
    assert found.state.dtype == torch.float32


def projected(parts: int, dtype: torch.dtype, *, normed: bool):
    """Parts [B, P, H, V] of a random projection of x, or of its norm; and what the norm's parts are, in fp64."""
    x, weight = torch.randn(BATCH, WIDTH).to(dtype), torch.randn(parts * HEADS * HEAD, WIDTH).to(dtype) / 6
    own = functional.linear(x if normed else srmsnorm_reference(x, eps=EPS), weight)
    source = own.double() if not normed else own.double() * _scale(x.double())
    shape = (parts, HEADS, HEAD)
    return own.unflatten(-1, shape), source.unflatten(-1, shape), NormedInput(x, EPS) if normed else None


def _scale(x: torch.Tensor) -> torch.Tensor:
    return (x.square().mean(-1, keepdim=True) + EPS).rsqrt()


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("form", [None, "cosine", "rotation"])
@pytest.mark.parametrize("inside", [False, True], ids=["gate_outside", "gate_and_norm_inside"])
@pytest.mark.parametrize("in_place", [False, True])
def test_the_step_of_a_fixed_decay_joins_its_parts(dtype, form, inside, in_place):
    own, source, unnormed = projected(4 if inside else 3, dtype, normed=inside)
    key = 2 * HEAD if form == "cosine" else HEAD
    state, gate = torch.randn(BATCH, HEADS, key, HEAD), torch.randn(BATCH, HEADS * HEAD).to(dtype)
    theta = None if form is None else torch.rand(HEADS, key // 2)
    slopes = None if form == "cosine" else SLOPES
    before = state.clone()
    found = gated_decay_step(
        own,
        state,
        slopes,
        gate=None if inside else gate,
        theta=theta,
        positions=POSITIONS,
        form=form,
        unnormed=unnormed,
        in_place=in_place,
        backend="triton",
    )
    q, k, v, *rest = source.unbind(1)
    q, k = functional.silu(q), functional.silu(k)
    if form is not None:
        encode = lrpe_cosine if form == "cosine" else lrpe_rotation
        q, k = (encode(x[:, None], theta.double(), POSITIONS[:, None])[:, 0] for x in (q, k))
    output, following = decay_step_reference(q, k, v, None if slopes is None else slopes.double(), before.double())
    assert_close(found, output, rest[0].flatten(1) if inside else gate.double(), following, dtype)
    assert (found.state is state) == in_place
    assert in_place or torch.equal(state, before)


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
def test_the_step_of_hgrn2_joins_its_parts(dtype, normed, activation):
    own, source, unnormed = projected(3, dtype, normed=normed)
    state, bound = torch.randn(BATCH, HEADS, HEAD, HEAD), torch.rand(HEADS * HEAD)
    bound[:4] = 0.0
    options = {"query_activation": activation, "silu_value": activation == "silu", "scale": 0.7}
    before = state.clone()
    found = gated_vector_step(own, state, bound, unnormed=unnormed, in_place=True, backend="triton", **options)
    assert found.state is state
    q, logit, v = source.unbind(1)
    q = functional.silu(q) if activation == "silu" else torch.sigmoid(q)
    v = functional.silu(v) if activation == "silu" else v
    forget = (bound + (1 - bound) * torch.sigmoid(logit.flatten(1))).unflatten(-1, (HEADS, HEAD))
    output, following = vector_decay_step_reference(q, 1 - forget, v, forget.log(), before.double(), scale=0.7)
    assert_close(found, output, 1.0, following, dtype)


def test_what_the_kernels_do_not_take_is_refused():
    parts, state = torch.ones(BATCH, 3, HEADS, HEAD), torch.ones(BATCH, HEADS, HEAD, HEAD)
    options = {"query_activation": "silu", "silu_value": False, "scale": 1.0, "backend": "triton"}
    with pytest.raises(KernelError, match=r"gated_vector_step: the triton kernel does not take dtype torch\.float64"):
        gated_vector_step(parts.double(), state, torch.zeros(60), **options)
    with pytest.raises(KernelError, match=r"does not take a state or parameter of torch\.float64"):
        gated_vector_step(parts, state.double(), torch.zeros(60), **options)
    with pytest.raises(KernelError, match="does not take a state that is not contiguous"):
        gated_vector_step(parts, state.mT, torch.zeros(60), **options)
    with pytest.raises(KernelError, match="gated_decay_step: the triton kernel does not take tensors that need grad"):
        gated_decay_step(
            parts.clone().requires_grad_(),
            state,
            None,
            gate=torch.ones(BATCH, 60),
            positions=POSITIONS,
            backend="triton",
        )
    with pytest.raises(OperandError, match="gated_decay_step: positions has shape"):
        gated_decay_step(parts, state, None, gate=torch.ones(BATCH, 60), positions=POSITIONS[:1])
