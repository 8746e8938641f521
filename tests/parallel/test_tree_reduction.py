"""The tree over a step's micro-batches: the same bits however its leaves are divided over ranks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from megalin.parallel.collectives import Axis
from megalin.parallel.tree_reduction import (
    NORM_BLOCK,
    TreeSum,
    flatten,
    fold,
    gather_slices,
    leaf_order,
    norm_of_slices,
    padded_size,
    sum_of_losses,
    sum_over_ranks,
)
from tests.parallel.on_ranks import make_mesh
from tests.ranks import run_ranks

LEAVES = 16
ONE = Axis("data")


def leaf(number: int) -> list[Tensor]:
    """The gradients of a micro-batch, of two blocks of a norm and a rest. Their sizes differ by powers of ten, so that
    every other order of additions has other bits."""
    generator = torch.Generator().manual_seed(number)
    sizes = (torch.rand(2 * NORM_BLOCK + 100, generator=generator) * 6).to(torch.int32)
    x = torch.randn(2 * NORM_BLOCK + 100, generator=generator) * 10.0**sizes
    return [x[:77].view(7, 11), x[77:]]


def sum_by_recursion(first: int, step: int) -> Tensor:
    """Sum of the micro-batches first, first + step, first + 2 step and so on: the even ones of them, then the odd."""
    if first + step >= LEAVES:
        return torch.cat([tensor.flatten() for tensor in leaf(first)])
    return sum_by_recursion(first, 2 * step) + sum_by_recursion(first + step, 2 * step)


def sum_of_rank(rank: int, num_ranks: int) -> Tensor:
    """The sum of a rank's micro-batches, taken in the order of the loader's list."""
    own, total = range(rank, LEAVES, num_ranks), TreeSum()
    for place in leaf_order(len(own)):
        total.add(flatten(leaf(own[place]), num_ranks=num_ranks, dtype=torch.float32))
    return total.total()


@pytest.mark.parametrize(("count", "order"), [(1, [0]), (2, [0, 1]), (4, [0, 2, 1, 3]), (8, [0, 4, 2, 6, 1, 5, 3, 7])])
def test_leaves_are_added_in_the_order_of_their_reversed_bits(count, order):
    assert leaf_order(count) == order


@pytest.mark.parametrize("count", [0, 3, 6])
def test_other_numbers_of_leaves_are_no_tree(count):
    with pytest.raises(AssertionError, match=str(count)):
        leaf_order(count)


def test_a_sum_of_one_rank_is_that_of_the_recursion():
    expected = sum_by_recursion(0, 1)
    assert torch.equal(sum_of_rank(0, 1)[: expected.numel()], expected)
    assert not torch.equal(torch.stack([torch.cat([t.flatten() for t in leaf(n)]) for n in range(16)]).sum(0), expected)


def test_the_counter_holds_one_tensor_a_level_and_refuses_an_incomplete_tree():
    counter, most = TreeSum(), 0
    for number in range(1, 16):
        counter.add(torch.ones(()))
        assert len(counter._sums) == number.bit_count()
        most = max(most, len(counter._sums))
    assert most == 4
    with pytest.raises(AssertionError, match=r"\[8, 4, 2, 1\] leaves"):
        counter.total()
    counter.add(torch.ones(()))
    assert counter.total() == 16


def test_a_fold_adds_halves_whatever_the_other_dimensions_are():
    x = torch.stack([leaf(number)[1] for number in range(8)])
    quarters = [(x[a] + x[a + 4]) + (x[a + 2] + x[a + 6]) for a in range(2)]
    assert torch.equal(fold(x), quarters[0] + quarters[1])
    for columns in (slice(0, 1), slice(3, 8), slice(1, None, 3)):
        assert torch.equal(fold(x[:, columns]), fold(x)[columns])
        assert torch.equal(fold(x[:, columns].T, dim=1), fold(x)[columns])


def test_padding_to_more_ranks_does_not_change_a_norm():
    tensors = leaf(0)
    whole = torch.cat([tensor.flatten() for tensor in tensors])
    assert [padded_size(whole.numel(), ranks) // NORM_BLOCK for ranks in (1, 2, 4)] == [3, 4, 4]
    norms = [norm_of_slices(flatten(tensors, num_ranks=ranks, dtype=torch.float32), ONE) for ranks in (1, 2, 4, 8)]
    assert len({norm.item() for norm in norms}) == 1
    assert norms[0].item() == pytest.approx(whole.double().norm().item(), rel=1e-6)


def test_gradients_of_a_lower_precision_are_added_in_the_given_one():
    tensors = [tensor.bfloat16() for tensor in leaf(3)]
    flat = flatten(tensors, num_ranks=2, dtype=torch.float32)
    assert (flat.dtype, len(flat)) == (torch.float32, 4 * NORM_BLOCK)
    assert torch.equal(flat[: 2 * NORM_BLOCK + 100], torch.cat([tensor.flatten() for tensor in tensors]).float())
    assert not flat[2 * NORM_BLOCK + 100 :].any()


def _on_ranks() -> tuple[np.ndarray, float, np.ndarray]:
    axis = make_mesh(1).data
    own = sum_over_ranks(sum_of_rank(axis.rank, axis.size), axis)
    assert len(own) * axis.size == padded_size(2 * NORM_BLOCK + 100, axis.size)
    losses = torch.tensor([10.0**axis.rank / 3, 1.0], dtype=torch.float64)
    return (
        gather_slices(own, axis).numpy().copy(),
        norm_of_slices(own, axis).item(),
        sum_of_losses(losses, axis).numpy().copy(),
    )


@pytest.mark.parametrize("num_ranks", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_ranks_add_up_to_the_bits_of_one(num_ranks):
    expected = sum_of_rank(0, 1)
    norm = norm_of_slices(expected, ONE).item()
    thirds = [10.0**rank / 3 for rank in range(num_ranks)]
    loss = (thirds[0] + thirds[2]) + (thirds[1] + thirds[3]) if num_ranks == 4 else thirds[0] + thirds[1]
    for total, found, losses in run_ranks(num_ranks, _on_ranks):
        assert np.array_equal(total[: len(expected)], expected[: len(total)].numpy())
        assert found == norm
        assert losses.tolist() == [loss, num_ranks]
