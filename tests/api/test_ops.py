"""Public ops as a plain script uses them: alone, on plain tensors, equal to their references, with gradients."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megalin import ops

B, T, H, K, D, V = 2, 70, 2, 8, 16, 6


def heads(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def negative(*shape: int) -> Tensor:
    return -torch.rand(*shape, dtype=torch.float64)


SLOPES = torch.tensor([0.5, 0.1], dtype=torch.float64)
POSITIONS = torch.arange(T)
THETA = torch.rand(H, K)
Q, KEYS, VALUES = (B, T, H, K), (B, T, H, K), (B, T, H, V)
STATE = (B, H, K, V)

CALLS: dict[str, tuple[Callable[..., Any], list[Callable[[], Tensor]]]] = {
    "decay_scan": (
        lambda f, q, k, v: f(q, k, v, SLOPES),
        [lambda: heads(*Q), lambda: heads(*Q), lambda: heads(*VALUES)],
    ),
    "decay_step": (
        lambda f, q, k, v, s: f(q, k, v, SLOPES, s),
        [lambda: heads(B, H, K), lambda: heads(B, H, K), lambda: heads(B, H, V), lambda: heads(*STATE)],
    ),
    "scalar_decay_scan": (
        lambda f, *x: f(*x),
        [lambda: heads(*Q), lambda: heads(*Q), lambda: heads(*VALUES), lambda: negative(B, T, H)],
    ),
    "scalar_decay_step": (
        lambda f, *x: f(*x),
        [
            *(lambda: heads(B, H, K),) * 2,
            lambda: heads(B, H, V),
            lambda: negative(B, H),
            lambda: heads(*STATE),
        ],
    ),
    "vector_decay_scan": (
        lambda f, *x: f(*x),
        [lambda: heads(*Q), lambda: heads(*Q), lambda: heads(*VALUES), lambda: negative(*Q)],
    ),
    "forget_gate_scan": (
        lambda f, *x: f(*x),
        [lambda: heads(*Q), lambda: heads(*Q), lambda: heads(*VALUES), lambda: 0.1 - 0.5 * negative(*Q[2:])],
    ),
    "vector_decay_step": (
        lambda f, *x: f(*x),
        [
            *(lambda: heads(B, H, K),) * 2,
            lambda: heads(B, H, V),
            lambda: negative(B, H, K),
            lambda: heads(*STATE),
        ],
    ),
    "selective_scan": (
        lambda f, *x: f(*x),
        [*(lambda: heads(B, T, K),) * 2, lambda: heads(B, T, D), lambda: -negative(B, T, D), lambda: negative(D, K)],
    ),
    "selective_step": (
        lambda f, *x: f(*x),
        [
            *(lambda: heads(B, K),) * 2,
            lambda: heads(B, D),
            lambda: -negative(B, D),
            lambda: negative(D, K),
            lambda: heads(B, D, K),
        ],
    ),
    "short_conv": (lambda f, *x: f(*x), [lambda: heads(B, T, D), lambda: heads(D, 4), lambda: heads(D)]),
    "tpe": (lambda f, *x: f(*x), [lambda: heads(B, T, D), lambda: heads(D, 3), lambda: negative(3)]),
    "tpe_step": (
        lambda f, *x: f(*x),
        [lambda: heads(B, D), lambda: heads(D, 3), lambda: negative(3), lambda: heads(B, D, 3)],
    ),
    "causal_attention": (lambda f, *x: f(*x), [lambda: heads(*Q)] * 3),
    "softmax_attention": (lambda f, *x: f(*x), [lambda: heads(*Q)] * 3),
    "window_attention": (
        lambda f, *x: f(*x, window=9),
        [lambda: heads(*Q), lambda: heads(B, T, K), lambda: heads(*Q)],
    ),
    "bidirectional_attention": (lambda f, *x: f(*x), [lambda: heads(*Q)] * 3),
    "dense_attention": (lambda f, *x: f(*x), [lambda: heads(*Q), lambda: heads(*Q), lambda: heads(*VALUES)]),
    "rms_norm": (lambda f, *x: f(*x, eps=1e-6), [lambda: heads(B, T, D), lambda: heads(D)]),
    "srmsnorm": (lambda f, x: f(x, eps=1e-6), [lambda: heads(B, T, D)]),
    "layer_norm": (lambda f, *x: f(*x, eps=1e-6), [lambda: heads(B, T, D), lambda: heads(D), lambda: heads(D)]),
    "max_norm": (lambda f, x: f(x, eps=1e-6), [lambda: heads(B, T, D)]),
    "gated_product": (lambda f, x: f(x, activation="silu"), [lambda: heads(B, T, D)]),
    "low_rank_gate": (
        lambda f, *x: f(*x),
        [lambda: heads(B, T, D), lambda: heads(B, T, 3), lambda: heads(D, 3), lambda: heads(D)],
    ),
    "forget_gates": (lambda f, *x: f(*x), [lambda: heads(B, T, D), lambda: 0.1 - 0.5 * negative(D)]),
    "lrpe_cosine": (lambda f, x: f(x, THETA, POSITIONS), [lambda: heads(*Q)]),
    "lrpe_rotation": (lambda f, x: f(x, THETA[:, : K // 2], POSITIONS), [lambda: heads(*Q)]),
    "rope": (lambda f, x: f(x, POSITIONS), [lambda: heads(*Q)]),
    "silu_lrpe": (lambda f, x: f(x, THETA, POSITIONS, form="cosine"), [lambda: heads(B, T, 3, H, K)]),
}
"""How a script calls each op, and its inputs that have gradients."""


def outputs(result: Any) -> list[Tensor]:
    """The tensors of an op's result."""
    fields = [result] if isinstance(result, Tensor) else list(result)
    return [field for field in fields if isinstance(field, Tensor)]


def test_every_public_op_has_a_call():
    """And a place in the page's table."""
    assert {name for name in ops.__all__ if not name.endswith("_reference")} == CALLS.keys()
    page = (Path(__file__).parents[2] / "docs/api.md").read_text(encoding="utf-8")
    table = page.partition("| room | ops |")[2].partition("\n\n")[0]
    assert set(re.findall(r"`(\w+)`", table)) == CALLS.keys()


@pytest.mark.parametrize("name", CALLS)
def test_op_alone_equals_its_reference_and_has_gradients(name: str):
    call, make = CALLS[name]
    inputs = [each().requires_grad_() for each in make]
    found = outputs(call(getattr(ops, name), *inputs))
    weights = [torch.randn_like(each) for each in found]
    gradients = torch.autograd.grad(sum((w * x).sum() for w, x in zip(weights, found, strict=True)), inputs)
    assert all(gradient.isfinite().all() and gradient.any() for gradient in gradients)
    if hasattr(ops, f"{name}_reference"):
        expected = outputs(call(getattr(ops, f"{name}_reference"), *inputs))
        torch.testing.assert_close(found, expected)
        total = sum((w * x).sum() for w, x in zip(weights, expected, strict=True))
        torch.testing.assert_close(gradients, torch.autograd.grad(total, inputs))


def test_operands_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="decay_scan"):
        ops.decay_scan(heads(*Q), heads(B, T, H, 3), heads(*VALUES), SLOPES)
