"""Context parallelism with the data axis, as `megalin verify` compares it; with tp too in test_three_axes.py."""

from __future__ import annotations

from typing import Any

import pytest

from tests.cases import REPRESENTATIVES
from tests.encoder_cases import CASES as ENCODERS
from tests.verify.test_context_parallel import MIXER_CASES, assert_agrees, compared, named

MESHES: list[tuple[int, dict[str, Any]]] = [
    (6, {"cp": 3, "dp": 2, "shard": 1}),
    (4, {"cp": 4, "shard": 2}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "mesh"), MESHES)
def test_every_mixer_agrees_with_one_process_on_every_mesh(ranks: int, mesh: dict[str, Any]):
    """A case a mixer; every case for context parallelism alone, on four ranks."""
    cases = MIXER_CASES if "shard" in mesh and ranks == 4 else REPRESENTATIVES
    for found in compared(ranks, named(cases, **mesh) | named(ENCODERS, length=36, **mesh), {})[0].values():
        assert_agrees(found)
