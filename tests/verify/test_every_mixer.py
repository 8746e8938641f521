"""Every mixer by the proof command's own comparison on tp 2 and 4 with dp 2: to the weights after a step.

Losses and gradients of every row on ten meshes are tests/model/test_mesh_parity.py's.
"""

from __future__ import annotations

from typing import Any

import pytest

from megalin.parallel.mesh import ParallelConfig
from megalin.verify.case import make_case
from megalin.verify.comparison import kind
from tests.cases import CASES, LENGTH
from tests.cases import Case as MixerCase
from tests.ranks import run_ranks
from tests.verify.meshes import verify_all

MESHES = {4: (2, 2), 8: (4, 2)}
"""World size: (tp, dp)."""
KINDS = {"logits", "token_losses", "loss", "grad_norm", "gradient", "weight"}


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
    tp, dp = MESHES[world_size]
    # As it is, which has heads for every tp; a row of a few chunks that tp divides.
    options: dict[str, Any] = {"dtype": "float64", "full": True, "length": LENGTH + 4, "recompute": False}
    cases = [make_case(row.model, ParallelConfig(tp=tp), data_size=dp, **options) for row in ROWS]
    for row, found in zip(ROWS, run_ranks(world_size, verify_all, cases)[0], strict=True):
        assert {kind(each.name) for each in found} >= KINDS
        assert [each for each in found if not each.passed] == [], row.name
