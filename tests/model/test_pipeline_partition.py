"""Partitions of costs into contiguous runs, one or several a rank, against an exhaustive search."""

from __future__ import annotations

import itertools
import random
from types import SimpleNamespace

import pytest
from torch.distributed.pipelining import ScheduleInterleaved1F1B

from megalin.model.pipeline_partition import Operation, _moves, cut_evenly, cut_for_interleaving, interleaved_order


def every_cut(size: int, num_runs: int) -> list[list[range]]:
    """All partitions of `size` costs into runs."""
    inner = itertools.combinations(range(1, size), num_runs - 1)
    ends = (itertools.pairwise([0, *each, size]) for each in inner)
    return [[range(start, end) for start, end in each] for each in ends]


def run_costs(costs: list[int], cut: list[range]) -> list[int]:
    return [sum(costs[run.start : run.stop]) for run in cut]


def evenness(costs: list[int], cut: list[range]) -> tuple[int, int]:
    """Cost of the most expensive run, and the sum of squares."""
    runs = run_costs(costs, cut)
    return max(runs), sum(cost**2 for cost in runs)


def random_costs(seed: int, size: int) -> list[int]:
    """Uneven random costs, with a head at the end."""
    draw = random.Random(seed)
    return [draw.randint(1, 20) for _ in range(size - 1)] + [draw.randint(1, 60)]


def step_seconds(costs: list[int], cut: list[range], num_ranks: int, rounds: int = 8) -> int:
    """Time of an interleaved 1F1B step. An operation starts once the previous one on its rank and the one that computes
    its input are done."""
    runs = run_costs(costs, cut)
    orders = [
        interleaved_order(rank, num_ranks, len(cut) // num_ranks, rounds * num_ranks) for rank in range(num_ranks)
    ]
    done: dict[Operation, int] = {}
    now = [0] * num_ranks
    while any(orders):
        for rank, order in enumerate(orders):
            if not order:
                continue
            operation, ready = order[0], 0
            if operation.backward or operation.stage > 0:
                source = Operation(True, operation.stage + 1, operation.micro_batch)
                if not operation.backward:
                    source = Operation(False, operation.stage - 1, operation.micro_batch)
                elif operation.stage == len(cut) - 1:
                    source = operation._replace(backward=False)
                if source not in done:
                    continue
                ready = done[source]
            now[rank] = done[order.pop(0)] = max(now[rank], ready) + (1 + operation.backward) * runs[operation.stage]
    return max(now)


def lengths(costs: list[int], num_runs: int) -> list[int]:
    return [len(run) for run in cut_evenly(costs, num_runs)]


def test_largest_run_is_as_small_as_it_can_be():
    assert lengths([1] * 8, 4) == [2, 2, 2, 2]
    assert lengths([1, 1, 1, 1, 1, 1, 1, 4], 3) in ([3, 4, 1], [4, 3, 1])  # a head that costs three layers
    assert lengths([9, 1, 1, 1], 2) == [1, 3]


def test_the_remainder_is_spread():
    assert sorted(lengths([1] * 10, 4)) == [2, 2, 3, 3]


def test_one_a_run():
    ranges = [range(0, 1), range(1, 2), range(2, 3), range(3, 4)]
    assert cut_evenly([5, 1, 7, 2], 4) == cut_for_interleaving([5, 1, 7, 2], 4, num_ranks=2) == ranges


@pytest.mark.parametrize("num_runs", [2, 3, 5])
def test_even_cut_is_the_best_of_all(num_runs: int):
    for seed in range(40):
        costs = random_costs(seed, num_runs + 1 + seed % 7)
        cut = cut_evenly(costs, num_runs)
        assert [number for run in cut for number in run] == [*range(len(costs))]
        assert all(cut)
        best = min(evenness(costs, each) for each in every_cut(len(costs), num_runs))
        assert evenness(costs, cut) == best, costs


def test_what_is_below_the_largest_run_is_even_too():
    """The first runs of the best partition may be larger than those of others, if below the largest run of all."""
    assert lengths([15, 8, 4, 3, 16, 9, 27], 4) == [1, 3, 2, 1]


@pytest.mark.parametrize(("num_ranks", "runs_a_rank"), [(2, 2), (2, 3), (3, 2)])
def test_cut_for_interleaving_is_done_as_soon_as_any(num_ranks: int, runs_a_rank: int):
    num_runs = num_ranks * runs_a_rank
    for seed in range(12):
        costs = random_costs(seed, num_runs + 1 + seed % 4)
        cut = cut_for_interleaving(costs, num_runs, num_ranks=num_ranks)
        assert [number for run in cut for number in run] == [*range(len(costs))]
        assert all(cut)
        best = min(step_seconds(costs, each, num_ranks) for each in every_cut(len(costs), num_runs))
        assert step_seconds(costs, cut, num_ranks) == best, costs


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_cut_for_interleaving_of_many_layers_beats_the_even_cut(num_ranks: int):
    for seed in range(2):
        costs = random_costs(seed, 100)
        even, cut = cut_evenly(costs, 16), cut_for_interleaving(costs, 16, num_ranks=num_ranks)
        assert step_seconds(costs, cut, num_ranks) < step_seconds(costs, even, num_ranks)


def test_fewer_changes_of_many_stages_are_compared():
    assert len(_moves(16, most=10**6)) == 2 * 15 * 16 / 2
    assert 2 * 63 < len(_moves(64, most=305)) <= 305
    assert len(_moves(128, most=76)) == 2 * 127


@pytest.mark.parametrize(("num_ranks", "stages_a_rank", "num_micro_batches"), [(2, 2, 16), (4, 3, 8), (3, 2, 3)])
def test_order_is_the_engines(num_ranks: int, stages_a_rank: int, num_micro_batches: int):
    for rank in range(num_ranks):
        engine = SimpleNamespace(
            pp_group_size=num_ranks,
            n_local_stages=stages_a_rank,
            microbatches_per_round=num_ranks,
            _n_microbatches=num_micro_batches,
            rank=rank,
        )
        actions = ScheduleInterleaved1F1B._calculate_single_rank_operations(engine, rank)  # type: ignore[arg-type]
        order = interleaved_order(rank, num_ranks, stages_a_rank, num_micro_batches)
        kinds = {False: "F", True: "B"}
        assert [f"{stage}{kinds[backward]}{number}" for backward, stage, number in order] == [
            str(action) for action in actions if action is not None
        ]
