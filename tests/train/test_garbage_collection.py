"""Objects that the garbage collector skips during a run, and how long."""

import gc
from collections.abc import Callable
from pathlib import Path

import pytest

from megalin.train.config import load_run_config
from megalin.train.engine import FullyShardedEngine
from megalin.train.garbage_collection import without_long_collections
from megalin.train.loop import train
from tests.model_runs import CPU, STEPS, write_config
from tests.ranks import run_ranks


class Node:
    """An object that only a collection frees."""

    def __init__(self) -> None:
        self.itself = self


def left_out(before: Callable[[], None]) -> None:
    before()
    with without_long_collections() as freeze:
        garbage = Node()
        del garbage
        freeze()
        frozen = gc.get_freeze_count()
        assert frozen > 10_000  # this process has loaded torch
        assert len(gc.get_objects()) < frozen / 10
        assert gc.isenabled()
    assert gc.get_freeze_count() == 0
    assert not any(type(each) is Node for each in gc.get_objects())


@pytest.mark.parametrize("before", [gc.unfreeze, gc.freeze], ids=["nothing_before", "something_before"])
def test_objects_are_left_out_to_the_end_of_the_body(before):
    """On a rank: a collection of this process visits all tests."""
    run_ranks(1, left_out, before)


def frozen_by_step(config: Path, folder: Path) -> list[int]:
    """Number of objects excluded from collections, at the start of each step of a run and after it."""
    gc.unfreeze()
    counts: list[int] = []
    step = FullyShardedEngine.step

    def counted(engine: FullyShardedEngine, *args: object, **options: object) -> object:
        counts.append(gc.get_freeze_count())
        return step(engine, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FullyShardedEngine, "step", counted)
        train(load_run_config(config, []), CPU, folder)
    return [*counts, gc.get_freeze_count()]


def test_a_run_leaves_out_what_its_first_step_made(tmp_path):
    (first, *others, after) = run_ranks(1, frozen_by_step, write_config(tmp_path), tmp_path / "run")[0]
    assert (first, after) == (0, 0)
    assert len(others) == STEPS - 1
    assert min(others) > 100_000
    assert others == sorted(others, reverse=True)  # done once: afterwards excluded objects are only freed
