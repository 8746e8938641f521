"""The scan that decays along keys and values, and its transition, against loops over tokens and ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megalin.errors import OperandError
from megalin.ops.scans.driver import ScanOutput
from megalin.ops.scans.transition import ShardDocuments, TwoSidedDecay
from megalin.ops.scans.two_sided_decay import two_sided_scan, two_sided_step
from tests.numerics import relative_error

BOUND = 1e-12


def inputs(length: int, *, strength: float = 1.0) -> list[Tensor]:
    """q, k, v, both decays and the initial state, fp64."""
    generator = torch.Generator().manual_seed(length)
    shapes = [(2, length, 2, 5), (2, length, 2, 5), (2, length, 2, 3)]
    q, k, v = (torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes)
    decays = [-strength * torch.rand(shape, dtype=torch.float64, generator=generator) for shape in shapes[1:]]
    state = torch.randn(2, 2, 5, 3, dtype=torch.float64, generator=generator)
    return [x.requires_grad_() for x in (q, k, v, *decays, state)]


def token_by_token(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, state: Tensor, documents: Tensor | None
) -> ScanOutput:
    rows = []
    for t in range(q.shape[1]):
        if documents is not None and t:
            state = state * (documents[:, t] == documents[:, t - 1]).double()[:, None, None, None]
        state = torch.exp(a[:, t])[..., None] * state * torch.exp(b[:, t])[..., None, :]
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], v[:, t])
        rows.append(0.5 * torch.einsum("bhk,bhkv->bhv", q[:, t], state))
    return ScanOutput(torch.stack(rows, 1), state)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("length", "strength"), [(1, 1.0), (16, 1.0), (17, 60.0), (40, 0.01), (40, 3.0)])
def test_outputs_states_and_gradients_equal_the_recurrence(length: int, strength: float, packed: bool):
    tensors, documents = inputs(length, strength=strength), None
    if packed:
        documents = torch.stack([torch.arange(length) // 7, (torch.arange(length) >= 16).long()]).int()
    options: dict[str, Any] = {"scale": 0.5, "document_ids": documents}
    *operands, state = tensors
    found = two_sided_scan(*operands, initial_state=state, **options)
    expected = token_by_token(*tensors, documents)
    gradients = []
    for result in (found, expected):
        loss = (result.output * torch.linspace(1, 2, result.output.numel()).view_as(result.output)).sum()
        loss = loss + (result.state * 0.3).sum()
        gradients.append(torch.autograd.grad(loss, tensors))
    assert relative_error(found.output, expected.output) <= BOUND
    assert relative_error(found.state, expected.state) <= BOUND
    for mine, theirs in zip(*gradients, strict=True):
        assert mine.isfinite().all()
        assert (mine - theirs).norm() <= BOUND * max(1.0, theirs.norm().item())


def test_a_step_equals_the_scan_without_a_decay_of_keys_too():
    q, k, v, _, b, state = (x.detach() for x in inputs(1))
    found = two_sided_step(q[:, 0], k[:, 0], v[:, 0], None, b[:, 0], state, scale=0.5)
    expected = two_sided_scan(q, k, v, None, b, scale=0.5, initial_state=state)
    assert relative_error(found.output, expected.output[:, 0]) <= BOUND
    assert relative_error(found.state, expected.state) <= BOUND


@pytest.mark.parametrize("step", [1, -1])
def test_the_fold_of_ranks_is_the_chain_of_their_transitions(step: Any):
    """Four ranks; in the second sequence the document of the others begins after rank 0."""
    ranks = 4
    a, b = -torch.rand(ranks, 2, 3, 5, dtype=torch.float64), -torch.rand(ranks, 2, 3, 4, dtype=torch.float64)
    x = torch.randn(ranks, 2, 3, 5, 4, dtype=torch.float64)
    continues = torch.ones(ranks, ranks, dtype=torch.bool).tril(-1)[..., None].repeat(1, 1, 2)
    continues[:, 0, 1] = False
    documents, all_ranks = ShardDocuments(continues, torch.ones(2, dtype=torch.bool)), TwoSidedDecay(a, b)
    for rank in range(ranks):
        expected = torch.zeros_like(x[0])
        order = range(rank) if step == 1 else range(ranks - 1, rank, -1)
        for other in order:
            visible = continues[rank, other] if step == 1 else continues[other, rank]
            through = TwoSidedDecay(a[other], b[other])
            expected = through.apply(expected) + x[other] * visible[:, None, None, None]
        assert relative_error(all_ranks.fold(x, documents, rank=rank, step=step) + 1.0, expected + 1.0) <= BOUND


def test_gradients_of_the_transition_are_those_of_autograd():
    a, b = ((-torch.rand(2, 3, width, dtype=torch.float64)).requires_grad_() for width in (5, 4))
    state, d_leaving = (torch.randn(2, 3, 5, 4, dtype=torch.float64) for _ in range(2))
    transition, through = TwoSidedDecay(a, b), torch.tensor([True, False])
    (transition.apply(state) * d_leaving * through[:, None, None, None]).sum().backward()
    found = TwoSidedDecay(a.detach(), b.detach()).gradients(state, d_leaving, through)
    assert relative_error(found[0], a.grad) <= BOUND
    assert relative_error(found[1], b.grad) <= BOUND


def test_shapes_that_do_not_match_are_refused():
    q, k, v, a, b, _ = inputs(4)
    with pytest.raises(OperandError, match=r"two_sided_scan: value_decay has shape .* but V = 3 in v; they must be"):
        two_sided_scan(q, k, v, a, b[..., :2])
