"""Every mixer by the proof command's own comparison on tp 1, 2, 4 with dp 1, 2: to the weights after a step."""

from __future__ import annotations

import pytest

from megalin.parallel.mesh import ParallelConfig
from megalin.verify.case import make_case
from megalin.verify.comparison import kind
from tests.cases import CASES, LENGTH
from tests.cases import Case as MixerCase
from tests.ranks import run_ranks
from tests.verify.meshes import verify_all

MESHES = {1: [(1, 1)], 2: [(1, 2), (2, 1)], 4: [(2, 2), (4, 1)], 8: [(4, 2)]}
"""World size: (tp, dp)."""


def first_row_of_each_mixer() -> list[MixerCase]:
    seen: set[str] = set()
    found = []
    for case in CASES:
        types = {sublayer.type for _, block in case.model.blocks() for sublayer in block.sublayers}
        if types - seen:
            found.append(case)
        seen |= types
    return found


ROWS = first_row_of_each_mixer()


@pytest.mark.slow
@pytest.mark.parametrize("world_size", MESHES)
def test_every_mixer_agrees_with_one_process(world_size: int):
    cases, names = [], []
    for tp, dp in MESHES[world_size]:
        for row in ROWS:
            names.append(f"{row.name}, tp {tp}, dp {dp}")
            # As it is, which has heads for every tp; a row of a few chunks that tp divides.
            options = {"data_size": dp, "dtype": "float64", "full": True, "length": LENGTH + 4, "recompute": False}
            cases.append(make_case(row.model, ParallelConfig(tp=tp), **options))
    compared = run_ranks(world_size, verify_all, cases)[0]
    for name, rows in zip(names, compared, strict=True):
        assert {kind(row.name) for row in rows} >= {"logits", "token_losses", "loss", "grad_norm", "gradient", "weight"}
        assert [row for row in rows if not row.passed] == [], name
