"""Batches that a run leaves out: the batch of each step, unions of windows, and their form in a checkpoint."""

from __future__ import annotations

import random
from typing import Any

import pytest

from megalin.data.skipped_batches import SkippedBatches
from megalin.data.sources import Training


def test_a_step_reads_the_next_batch_outside_of_all_windows():
    generator = random.Random(0)
    for _ in range(50):
        drawn = [(first, first + generator.randrange(4)) for first in generator.choices(range(1, 30), k=3)]
        skipped = SkippedBatches().union(*drawn[:1]).union(*drawn[1:])
        left_out = {batch for first, last in drawn for batch in range(first, last + 1)}
        read = [batch for batch in range(1, 60) if batch not in left_out][:40]
        assert [skipped.batch(step) for step in range(41)] == [0, *read]
        assert {batch for first, last in skipped.windows for batch in range(first, last + 1)} == left_out
        for step in range(41):
            passed = {batch for batch in left_out if batch < skipped.batch(step)}
            assert {b for first, last in skipped.before(step).windows for b in range(first, last + 1)} == passed
        assert SkippedBatches.from_json(skipped.to_json()) == skipped


def test_the_identity_of_the_order_has_the_windows_and_phases_that_the_steps_have_passed():
    dataset: Any = None
    phases = [(0, {"a": 1.0}), (8, {"b": 1.0})]
    data = Training(dataset, dataset, [], phases, total_steps=None, skipped=SkippedBatches(((7, 8), (12, 12))))
    before, after = data.identity(6), data.identity(7)
    assert before["shares of the sources"] == [[0, {"a": 1.0}]]
    assert "skipped batches" not in before
    assert after["shares of the sources"] == [[0, {"a": 1.0}], [8, {"b": 1.0}]]  # step 7 reads batch 9
    assert after["skipped batches"] == [[7, 8]]


@pytest.mark.parametrize(
    "value", [None, 3, [3], [[1]], [[0, 2]], [[3, 2]], [[1, 2], [3, 4]], [[5, 6], [1, 2]], [[1, "2"]]]
)
def test_other_forms_are_refused(value):
    with pytest.raises(ValueError, match=r"expected windows \[first, last\] that rise"):
        SkippedBatches.from_json(value)
