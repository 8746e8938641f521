"""Estimates against what was measured on H200; docs/planner.md has all rows of `tests.scaling.measured`."""

import pytest

from tests.scaling.measured import ROWS

PIPELINE, ATTENTION = ROWS[-1], ROWS[7]


@pytest.mark.parametrize("row", [PIPELINE, ATTENTION], ids=lambda row: row.name())
def test_estimates_are_near_what_was_measured(row):
    found = row.estimate()
    assert found.memory.total / 2**30 == pytest.approx(row.peak_gib, rel=0.1)
    assert found.time.total == pytest.approx(row.step_seconds, rel=0.2)
