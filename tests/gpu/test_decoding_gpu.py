"""Kernels of decoding at the widths of models, against their references in fp64, and in a CUDA graph against eager."""

from __future__ import annotations

import pytest
import torch

from megalin.ops.decoding.few_rows import (
    add_linear,
    add_linear_reference,
    few_row_linear,
    normed_glu,
    normed_glu_reference,
)
from megalin.ops.decoding.gated_steps import (
    NormedInput,
    gated_decay_step,
    gated_decay_step_reference,
    gated_vector_step,
    gated_vector_step_reference,
)
from megalin.ops.decoding.sampling import draw_tokens

EPS = 1e-6
BOUND = 8e-3


def draw(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(shape, device="cuda") * scale).bfloat16()


def error(found: torch.Tensor, truth: torch.Tensor) -> float:
    return ((found.double() - truth).norm() / truth.norm()).item()


@pytest.fixture(autouse=True)
def _no_gradients():
    torch.manual_seed(0)
    with torch.no_grad():
        yield


@pytest.mark.parametrize("rows", [1, 3, 4, 5, 128])
@pytest.mark.parametrize(("width", "inner"), [(2048, 5632), (1536, 4096)])
def test_a_gated_unit_and_its_addition_in_a_graph(rows, width, inner):
    """Both matmuls and what joins them, launched early one after the other."""
    x, up, down = draw(rows, width, scale=9.0), draw(2 * inner, width, scale=0.02), draw(width, inner, scale=0.02)
    back = down.T.contiguous()
    torch.cuda.synchronize()

    def unit() -> torch.Tensor:
        product = normed_glu(x, up, eps=EPS, activation="silu", backend="triton")
        return few_row_linear(add_linear(x, product, down, backend="triton"), back)

    eager = unit()
    graph, y = torch.cuda.CUDAGraph(), None
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        y = unit()
    for _ in range(20):
        graph.replay()
    assert torch.equal(y, eager)
    wide = [tensor.double() for tensor in (x, up, down)]
    product = normed_glu_reference(wide[0], wide[1], eps=EPS, activation="silu")
    truth = add_linear_reference(wide[0], product, wide[2]) @ wide[2]
    assert error(eager, truth) < BOUND


@pytest.mark.parametrize("rows", [1, 4, 130])
@pytest.mark.parametrize("form", [None, "cosine", "rotation"])
def test_the_step_of_a_fixed_decay(rows, form):
    heads, head = 16, 128
    key = 2 * head if form == "cosine" else head
    parts, x, state = (
        draw(rows, 4, heads, head),
        draw(rows, 2048, scale=3.0),
        torch.randn(rows, heads, key, head).cuda(),
    )
    theta = None if form is None else torch.rand(heads, key // 2, device="cuda")
    slopes, positions = torch.rand(heads, device="cuda"), torch.randint(0, 9000, (rows,), device="cuda")
    options = {"gate": None, "positions": positions, "form": form}
    truth = gated_decay_step_reference(
        parts.double(),
        state.double(),
        slopes.double(),
        theta=None if theta is None else theta.double(),
        unnormed=NormedInput(x.double(), EPS),
        **options,
    )
    found = gated_decay_step(
        parts, state, slopes, theta=theta, unnormed=NormedInput(x, EPS), in_place=True, backend="triton", **options
    )
    assert found.state is state
    assert error(found.state, truth.state) < 1e-4
    assert error(found.product, truth.product) < BOUND
    assert error(found.squares.sum(1), truth.squares.sum(1)) < 1e-4


@pytest.mark.parametrize("rows", [1, 4, 130])
def test_the_step_of_hgrn2(rows):
    heads, head = 12, 128
    parts, x, state = (
        draw(rows, 3, heads, head),
        draw(rows, 1536, scale=3.0),
        torch.randn(rows, heads, head, head).cuda(),
    )
    bound = torch.rand(heads * head, device="cuda")
    options = {"query_activation": "silu", "silu_value": False, "scale": 1.0}
    truth = gated_vector_step_reference(
        parts.double(), state.double(), bound.double(), unnormed=NormedInput(x.double(), EPS), **options
    )
    found = gated_vector_step(
        parts, state, bound, unnormed=NormedInput(x, EPS), in_place=True, backend="triton", **options
    )
    assert error(found.state, truth.state) < 1e-4
    assert error(found.product, truth.product) < BOUND
    assert error(found.squares.sum(1), truth.squares.sum(1)) < 1e-4


@pytest.mark.parametrize("rows", [1, 128])
def test_draws_at_a_model_s_vocabulary(rows):
    logits = draw(rows, 50304, scale=3.0)
    logits[:, 50272:] = float("-inf")
    uniform = torch.rand(rows, dtype=torch.float64, device="cuda")
    tokens = draw_tokens(logits, uniform, temperature=0.8, backend="triton")
    cumulative = (logits.double() / 0.8).softmax(-1).cumsum(-1)
    upper = cumulative.gather(1, tokens[:, None]).squeeze(1)
    lower = cumulative.gather(1, (tokens - 1).clamp(min=0)[:, None]).squeeze(1).where(tokens > 0, 0.0)
    assert (uniform < upper + 1e-6).all()
    assert (uniform > lower - 1e-6).all()
    assert (tokens < 50272).all()
