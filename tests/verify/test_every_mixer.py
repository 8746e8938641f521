"""Every mixer as `megalin verify` compares it on tp 2 and 4 with dp 2, to the weights after a step.

tests/model/test_mesh_parity.py compares losses and gradients of every case on ten meshes.
"""

from __future__ import annotations

from typing import Any

import pytest

from megalin.parallel.config import ParallelConfig
from megalin.verify.case import make_case
from megalin.verify.comparison import kind
from tests.cases import CASES, LENGTH
from tests.cases import Case as MixerCase
from tests.ranks import run_ranks
from tests.verify.meshes import verify_all

MESHES = {4: (2, 2), 8: (4, 2)}
"""World size: (tp, dp)."""
KINDS = {"logits", "token_losses", "loss", "grad_norm", "gradient", "weight", "decoding"}


def first_case_of_each_mixer() -> list[MixerCase]:
    seen: set[str] = set()
    found = []
    for case in CASES:
        types = {sublayer.type for _, block in case.model.blocks() for sublayer in block.sublayers}
        if types - seen:
            found.append(case)
        seen |= types
    return found


MIXER_CASES = first_case_of_each_mixer()


@pytest.mark.slow
@pytest.mark.parametrize("world_size", MESHES)
def test_every_mixer_agrees_with_one_process(world_size: int):
    tp, dp = MESHES[world_size]
    # At full size, with heads for every tp, and with a length of a few chunks that tp divides.
    options: dict[str, Any] = {"dtype": "float64", "full": True, "length": LENGTH + 4, "recompute": False}
    cases = [make_case(case.model, ParallelConfig(tp=tp), data_size=dp, **options) for case in MIXER_CASES]
    for case, errors in zip(MIXER_CASES, run_ranks(world_size, verify_all, cases)[0], strict=True):
        assert {kind(error.name) for error in errors} >= KINDS
        assert [error for error in errors if not error.passed] == [], case.name
