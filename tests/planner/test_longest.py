"""The longest samples of each mesh: they fit by the search at their length, and a step more does not."""

import pytest
import torch

from megalin.planner.estimate import Estimate, Estimator
from megalin.planner.hardware import HARDWARE
from megalin.planner.longest import LENGTH_MULTIPLE, last_fitting, longest_sequences
from megalin.planner.search import Limits, search
from megalin.planner.workload import Workload
from tests.cases import HYBRID
from tests.planner.test_search import MODEL

H200 = HARDWARE["h200"]
MIB = 2**20


def workload(*, samples: int, compiled: bool = False) -> Workload:
    return Workload(MODEL, 0, samples, torch.bfloat16, compiled)


def fitting_meshes(work: Workload, limits: Limits, length: int) -> list[tuple[int, int, int]]:
    """Meshes that the search over all layouts at one length finds."""
    plan = search(Estimator(work._replace(length=length), H200), limits, count=100)
    return [mesh(estimate) for estimate in plan.best]


def mesh(estimate: Estimate) -> tuple[int, int, int]:
    parallel = estimate.layout.parallel
    return parallel.tp, parallel.cp, parallel.pp


MEMORY = {
    "affine": lambda n: 700 + 13 * n,
    "flat_first": lambda n: max(5000, 13 * n),
    "convex": lambda n: n * n,
    "concave": lambda n: int(1000 * n**0.5),
    "stairs": lambda n: 13 * (n // 50) * 50,
}
"""Non-decreasing functions, to search."""


@pytest.mark.parametrize("guess", [1, 40, 100_000])
@pytest.mark.parametrize("name", MEMORY)
def test_search_ends_at_the_last_number_that_fits(name, guess):
    function, called = MEMORY[name], []

    def memory(number: int) -> int:
        called.append(number)
        return function(number)

    for limit in (4999, 10_000, 123_457):
        called.clear()
        found = last_fitting(memory, limit, first=1, guess=guess, slope=13.0)
        assert found == max((number for number in range(1, 20_000) if function(number) <= limit), default=0)
        assert found == 0 or found in called
        assert found + 1 in called
        assert len(called) == len(set(called)) < 30


def test_the_longest_length_fits_and_the_next_one_does_not():
    work, limits = workload(samples=1), Limits(1, 150 * MIB)
    plan = longest_sequences(work, H200, limits, count=5)
    (best,) = plan.best
    assert (plan.num_meshes, plan.refusals) == (1, [])
    assert best.length > 4 * LENGTH_MULTIPLE
    assert best.length % LENGTH_MULTIPLE == 0
    assert best.estimate.memory.total <= limits.memory_bytes
    assert fitting_meshes(work, limits, best.length) == [(1, 1, 1)]
    assert fitting_meshes(work, limits, best.length + LENGTH_MULTIPLE) == []


@pytest.mark.slow
def test_each_mesh_has_its_longest_length():
    work, limits = workload(samples=4), Limits(2, 400 * MIB)
    plan = longest_sequences(work, H200, limits, count=100)
    assert {mesh(found.estimate) for found in plan.best} == {(1, 1, 1), (1, 1, 2), (1, 2, 1), (2, 1, 1)}
    lengths = [found.length for found in plan.best]
    assert lengths == sorted(lengths, reverse=True)
    assert len(set(lengths)) > 2
    for found in plan.best:
        assert mesh(found.estimate) in fitting_meshes(work, limits, found.length)
        assert mesh(found.estimate) not in fitting_meshes(work, limits, found.length + LENGTH_MULTIPLE)


@pytest.mark.slow
def test_compiled_blocks_are_searched_by_their_own_traces():
    work, limits = workload(samples=1, compiled=True), Limits(1, 60 * MIB)
    (best,) = longest_sequences(work, H200, limits, count=1).best
    assert fitting_meshes(work, limits, best.length) == [(1, 1, 1)]
    assert fitting_meshes(work, limits, best.length + LENGTH_MULTIPLE) == []


@pytest.mark.slow
def test_lengths_start_at_the_widest_window_and_are_multiples_for_all_ranks():
    """Three ranks of context parallelism; a window of 4,000 tokens."""
    block = HYBRID.model.layers[0].model_dump()
    window = {"type": "shared_key_attention", "num_heads": 4, "window": 4000}
    model = type(MODEL).model_validate(MODEL.model_dump() | {"layers": [block, {"sublayers": [window]}]})
    plan = longest_sequences(workload(samples=3)._replace(model=model), H200, Limits(3, 400 * MIB), count=100)
    (cp,) = (found for found in plan.best if mesh(found.estimate) == (1, 3, 1))
    assert cp.length % (3 * LENGTH_MULTIPLE) == 0
    assert min(found.length for found in plan.best) >= 4096


def test_meshes_without_a_length_have_a_reason():
    plan = longest_sequences(workload(samples=3), H200, Limits(2, 2 * MIB), count=100)
    assert plan.best == []
    kinds = {refusal.kind for refusal in plan.refusals}
    assert any(kind.startswith("memory, most of it") for kind in kinds)
    assert "samples a step are not divisible by dp" in kinds
