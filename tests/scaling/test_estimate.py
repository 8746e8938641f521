"""Estimates against what was measured on H200; docs/planner.md has all rows of `tests.scaling.measured`."""

import pytest

from tests.scaling.measured import ROWS

TAKEN = (
    "transnormerllm-1b-64k, 12 x 2 x 4096, pp 4, 8 + 10 + 10 + 4 sub-layers",
    "llama-1b, 1 x 1 x 262144, cp 4, recompute",
)
"""A pipeline, and a step that is nine tenths attention."""


@pytest.mark.parametrize("name", TAKEN)
def test_estimates_are_near_what_was_measured(name):
    row = {row.name(): row for row in ROWS}[name]
    found = row.estimate()
    assert found.memory.total / 2**30 == pytest.approx(row.peak_gib, rel=0.1)
    assert found.time.total == pytest.approx(row.step_seconds, rel=0.2)
