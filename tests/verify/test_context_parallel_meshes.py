"""Context parallelism with the data axis, by the proof command's own comparison; with tp too: test_three_axes.py."""

from __future__ import annotations

from typing import Any

import pytest

from tests.encoder_cases import CASES as ENCODERS
from tests.verify.test_context_parallel import ONE_A_MIXER, ROWS, assert_agrees, compared, named

MESHES: list[tuple[int, dict[str, Any]]] = [
    (6, {"cp": 3, "dp": 2, "shard": 1}),
    (4, {"cp": 4, "shard": 2}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "mesh"), MESHES)
def test_every_mixer_agrees_with_one_process_on_every_mesh(ranks: int, mesh: dict[str, Any]):
    """One row a mixer; every row where context parallelism is alone on four ranks."""
    rows = ROWS if "shard" in mesh and ranks == 4 else ONE_A_MIXER
    for found in compared(ranks, named(rows, **mesh) | named(ENCODERS, length=36, **mesh), {})[0].values():
        assert_agrees(found)
