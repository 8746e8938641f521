"""Fold, halo and sums of the context-parallel axis on 3 and 4 ranks against one process, with their gradients."""

from __future__ import annotations

from functools import lru_cache
from itertools import product

import pytest
import torch
from torch import Tensor

from megalin.ops.scans.driver import fold
from megalin.ops.scans.transition import DiagonalDecay
from megalin.parallel.collectives import Axis, all_gather
from megalin.parallel.config import ExchangeName, ParallelConfig
from megalin.parallel.context_parallel import ContextParallel
from megalin.parallel.mesh import Mesh
from tests.numerics import assert_close
from tests.parallel.on_ranks import Arrays, to_arrays, to_tensors
from tests.ranks import run_ranks

BATCH, HEADS, KEY, VALUE, SHARD = 5, 2, 3, 4, 6
WIDTH = 3
DECAYS = {"each rank's, a key": (BATCH, HEADS, KEY), "each rank's, a head": (BATCH, HEADS, 1), "equal": (HEADS, KEY)}


CASES = list(product(("all_gather", "ring"), DECAYS, (False, True)))


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def documents(size: int) -> Tensor:
    """Document ids [B, T]: one document; a start at a shard's first token; starts one before and one after a shard's
    first token; one over three shards; many."""
    starts = torch.zeros(BATCH, size * SHARD, dtype=torch.int32)
    for row, places in enumerate([(), (SHARD,), (SHARD - 1, 2 * SHARD + 1), (2,), (1, SHARD + 2, SHARD + 3)]):
        starts[row, list(places)] = 1
    return starts.cumsum(1, dtype=torch.int32)


def cp_of_all(exchange: ExchangeName = "auto") -> ContextParallel:
    size = torch.distributed.get_world_size()
    return Mesh(ParallelConfig(cp=size, cp_exchange=exchange), torch.device("cpu")).cp


def full_inputs(size: int, decay: tuple[int, ...]) -> dict[str, Tensor]:
    """Each rank's local state and log decay (equal ones once), inputs of a convolution, and weights of the results."""
    return {
        "state": normal(size, BATCH, HEADS, KEY, VALUE, seed=0),
        "log_decay": -normal(size if len(decay) == 3 else 1, *decay, seed=1).abs(),
        "x": normal(BATCH, size * SHARD, VALUE, seed=2),
        "weight": normal(size, BATCH, HEADS, KEY, VALUE, seed=3),
        "halo_weight": normal(size, BATCH, WIDTH, VALUE, seed=4),
    }


def _on_ranks() -> dict[tuple[str, str, bool], Arrays]:
    results = {}
    for exchange, name, packed in CASES:
        cp, decay = cp_of_all(exchange), DECAYS[name]
        given = full_inputs(cp.size, decay)
        rank = cp.axis.rank
        ids = cp.shard(documents(cp.size)) if packed else None
        x = cp.shard(given["x"]).detach().requires_grad_()
        state = given["state"][rank].detach().requires_grad_()
        log_decay = given["log_decay"][min(rank, len(given["log_decay"]) - 1)].detach().requires_grad_()
        ends = cp.shard_documents(x[..., 0], ids)
        entering = fold(state, DiagonalDecay(log_decay), cp.sequence_shard(ends))
        halo = cp.halo(x, ends, ids, width=WIDTH)
        ((entering * given["weight"][rank]).sum() + (halo * given["halo_weight"][rank]).sum()).backward()
        results[exchange, name, packed] = to_arrays(
            {
                "entering": entering,
                "halo": halo,
                "d_state": state.grad,
                "d_decay": log_decay.grad,
                "d_x": x.grad,
            }
        )
    return results


def one_process(size: int, decay: tuple[int, ...], packed: bool) -> list[dict[str, Tensor]]:
    """The recurrence, rank by rank, with the state reset at document starts."""
    given = full_inputs(size, decay)
    ids = documents(size) if packed else torch.zeros(BATCH, size * SHARD, dtype=torch.int32)
    state, x = given["state"].requires_grad_(), given["x"].requires_grad_()
    # Each rank has a leaf of its own: the gradient of a decay that is equal on all ranks is a partial sum on each.
    log_decay = given["log_decay"].expand(size, *decay).clone().requires_grad_()
    shards = ids.chunk(size, 1)
    entering = [torch.zeros_like(state[0])]
    for rank in range(1, size):
        before = shards[rank - 1]
        through = (before[:, 0] == before[:, -1]).view(-1, 1, 1, 1)
        decayed = (entering[-1] * log_decay[rank - 1].exp()[..., None]).where(through, 0.0)
        continues = (shards[rank][:, 0] == before[:, -1]).view(-1, 1, 1, 1)
        entering.append((decayed + state[rank - 1]).where(continues, 0.0))
    halos = []
    for rank in range(size):
        places = torch.arange(rank * SHARD - WIDTH, rank * SHARD)
        same = (ids[:, places.clamp(min=0)] == shards[rank][:, :1]) & (places >= 0)
        halos.append(x[:, places.clamp(min=0)].where(same[..., None], 0.0))
    loss = (torch.stack(entering) * given["weight"]).sum() + (torch.stack(halos) * given["halo_weight"]).sum()
    loss.backward()
    return [
        {
            "entering": entering[rank].detach(),
            "halo": halos[rank].detach(),
            "d_state": state.grad[rank],
            "d_decay": log_decay.grad[rank],
            "d_x": x.grad.chunk(size, 1)[rank],
        }
        for rank in range(size)
    ]


@lru_cache
def results(size: int) -> list[dict[tuple[str, str, bool], Arrays]]:
    return run_ranks(size, _on_ranks)


@pytest.mark.parametrize(("exchange", "name", "packed"), CASES)
@pytest.mark.parametrize("size", [3, 4])
def test_fold_and_halo_equal_the_recurrence_with_all_gradients(size, exchange, name, packed):
    expected = one_process(size, DECAYS[name], packed)
    for rank, found in enumerate(results(size)):
        assert_close(to_tensors(found[exchange, name, packed]), expected[rank], 1e-12)


def sums_of_one_process(added: Tensor, weight: Tensor, ids: Tensor) -> dict[str, list[Tensor]]:
    """By rank: the sums before and after its tokens, and the gradients of its own contributions [cp, 2, ...]."""
    size, leaves = len(added), added.clone().requires_grad_()
    ends = [(shard[:, 0], shard[:, -1]) for shard in ids.chunk(size, 1)]
    zero = torch.zeros_like(added[0, 0])
    found: dict[str, list[Tensor]] = {"before": [], "after": []}
    for own in range(size):
        before = [(ends[own][0] == ends[j][1]).view(-1, 1, 1, 1) * leaves[j, 1] for j in range(own)]
        after = [(ends[own][1] == ends[j][0]).view(-1, 1, 1, 1) * leaves[j, 0] for j in range(own + 1, size)]
        found["before"].append(sum(before, zero))
        found["after"].append(sum(after, zero))
    pairs = torch.stack([torch.stack(pair) for pair in zip(found["before"], found["after"], strict=True)])
    (pairs * weight).sum().backward()
    return found | {"d_first": list(leaves.grad[:, 0]), "d_last": list(leaves.grad[:, 1])}


def _sums() -> tuple[Arrays, Arrays]:
    """This rank's `neighbouring_run_sums`, and resharding to heads and back; and the same of one process."""
    cp = cp_of_all()
    ids, rank, size = documents(cp.size), cp.axis.rank, cp.size
    added = normal(size, 2, BATCH, HEADS, KEY, VALUE, seed=0)  # of the runs of the first and of the last token
    weight = normal(size, 2, BATCH, HEADS, KEY, VALUE, seed=1)
    first, last = (x.detach().requires_grad_() for x in added[rank])
    ends, exchanged = cp.shard_documents_of(ids), cp.shard_documents(cp.shard(ids), cp.shard(ids))
    before, after = cp.neighbouring_run_sums(first, last, ends)
    (before * weight[rank, 0] + after * weight[rank, 1]).sum().backward()
    q, v = normal(BATCH, size * SHARD, 2 * size, KEY, seed=2), normal(BATCH, size * SHARD, size, KEY, seed=3)
    own_q, own_v = cp.to_heads(cp.shard(q), cp.shard(v))
    found = {"before": before, "after": after, "d_first": first.grad, "d_last": last.grad}
    found |= {"q": own_q, "v": own_v, "back": cp.to_tokens(own_q), "gathered": cp.gather_tokens(cp.shard(v))}
    found |= {"continues": ends.continues, "through": ends.through}
    expected = {name: by_rank[rank] for name, by_rank in sums_of_one_process(added, weight, ids).items()}
    expected |= {"q": q.chunk(size, 2)[rank], "v": v.chunk(size, 2)[rank], "back": cp.shard(q), "gathered": v}
    expected |= {"continues": exchanged.continues, "through": exchanged.through}
    return to_arrays(found), to_arrays(expected)


@pytest.mark.parametrize("size", [3, 4])
def test_sums_around_and_the_way_to_heads_and_back_equal_one_process(size):
    for found, expected in run_ranks(size, _sums):
        assert_close(to_tensors(found), to_tensors(expected), 1e-13)


def _long_halo() -> tuple[object, object]:
    """The halo of shards of two tokens, which covers three ranks, and the expected one."""
    cp = cp_of_all()
    x = normal(BATCH, 2 * cp.size, VALUE, seed=0)
    own = cp.shard(x)
    halo = cp.halo(own, cp.shard_documents(own[..., 0], None), None, width=5)
    padded = torch.nn.functional.pad(x, (0, 0, 5, 0))
    return halo.numpy().copy(), padded[:, 2 * cp.axis.rank : 2 * cp.axis.rank + 5].numpy().copy()


def test_halo_wider_than_a_shard_reaches_several_ranks_back():
    for found, expected in run_ranks(4, _long_halo):
        assert (found == expected).all()


def _strong(exchange: ExchangeName) -> tuple[bool, list[float]]:
    """Log decays of -1e30 and 0: whether all results are finite, and the states."""
    cp = cp_of_all(exchange)
    state = torch.ones(1, 1, 2, 1, requires_grad=True)
    log_decay = torch.tensor([[[-1e30, 0.0]]], requires_grad=True)
    shard = cp.sequence_shard(cp.shard_documents(torch.zeros(1, 4), None))
    entering = fold(state, DiagonalDecay(log_decay), shard)
    entering.sum().backward()
    finite = all(bool(x.isfinite().all()) for x in (entering, state.grad, log_decay.grad))
    return finite, all_gather(entering.detach().flatten(), cp.axis, dim=0).tolist()


@pytest.mark.parametrize("exchange", ["all_gather", "ring"])
def test_decays_may_be_as_strong_as_any_number(exchange):
    for finite, entering in run_ranks(3, _strong, exchange):
        assert finite
        assert entering == [0.0, 0.0, 1.0, 1.0, 1.0, 2.0]


def test_axis_of_one_rank_has_full_sequences():
    cp = ContextParallel()
    tokens = torch.zeros(2, 7, dtype=torch.int64)
    assert cp.shard_documents(tokens, None) is None
    assert torch.equal(cp.shard(tokens), tokens)
    assert cp.positions(tokens).tolist() == list(range(7))


def test_shards_are_neighbouring_tokens_at_their_positions_in_the_sequence():
    cp = ContextParallel(Axis("cp", size=3, rank=2))
    assert cp.shard(torch.arange(12)[None]).tolist() == [[8, 9, 10, 11]]
    assert cp.positions(torch.zeros(1, 4)).tolist() == [8, 9, 10, 11]
