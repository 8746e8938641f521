"""Mixers, in one model with dropout, on meshes with every pair of axes, as `megalin verify` compares it.

The papers' ablation switches join them on tp 2 x cp 3; tests/model/test_ablations.py has other meshes.
"""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest

from tests.ablations import ENCODER_MOSAIC, MOSAIC
from tests.cases import CASES, Case
from tests.encoder_cases import CASES as ENCODERS
from tests.encoder_cases import Case as EncoderCase
from tests.verify.meshes import every_mixer, joined
from tests.verify.test_context_parallel import (
    Named,
    assert_agrees,
    compared,
    named,
    types_of,
    types_with_context_parallelism,
)

DROPOUT = {"embedding_dropout": 0.1, "hidden_dropout": 0.1}


EVERY_MIXER = every_mixer(**DROPOUT)
KINDS = joined(
    "kinds of mixers",
    [case for case in CASES if case.name in ("tnl", "hgrn2", "mamba2", "softmax")],
    num_blocks=3,
    **DROPOUT,
)
"""A decay a head and a key, a convolution with replicated weights, and attention."""
ENCODER = ENCODERS[2]._replace(model=ENCODERS[2].model.model_copy(update=DROPOUT))

MESHES: dict[int, list[dict[str, Any]]] = {
    6: [{"cp": 3, "tp": 2, "sequence_parallel": True}],
    8: [{"tp": 2, "pp": 2, "dp": 2}, {"cp": 2, "pp": 2, "dp": 2}],
    12: [
        {"cp": 3, "tp": 2, "dp": 2, "sequence_parallel": True},
        {"cp": 3, "tp": 2, "pp": 2},
        {"cp": 3, "pp": 2, "dp": 2},
    ],
    16: [
        {"cp": 4, "tp": 2, "dp": 2, "shard": 1},
        {"cp": 4, "tp": 2, "pp": 2, "sequence_parallel": True},
        {"cp": 4, "pp": 2, "dp": 2},
    ],
}
"""Axes by world size. Those of 6 and 8 ranks have every pair of axes, and cp 3 where two ranks hide a wrong decay."""
FAST = {6: EVERY_MIXER, 8: KINDS}
"""The mixers of `make test`: every mixer where it shards its heads and its tokens."""


def cases(world_size: int, mixers: Case) -> Named:
    found: Named = {}
    for mesh in MESHES[world_size]:
        found |= named([mixers], **mesh)
        if world_size == 6:
            found |= named([Case("ablations", MOSAIC)], **mesh)
        if world_size == 12 and "pp" not in mesh:
            found |= named([EncoderCase("encoder ablations", ENCODER_MOSAIC)], length=36, **mesh)
        if "pp" not in mesh:  # encoders have no pipeline
            found |= named([ENCODER], length=36 if mesh["cp"] == 3 else 40, **mesh)
    return found


def test_the_case_has_every_mixer():
    assert types_of([EVERY_MIXER]) == types_with_context_parallelism()


def test_the_fast_meshes_have_every_pair_of_axes():
    meshes = [{axis for axis in ("dp", "tp", "cp", "pp") if axis in mesh} for size in FAST for mesh in MESHES[size]]
    pairs = {frozenset(pair) for mesh in meshes for pair in combinations(mesh, 2)}
    assert pairs == {frozenset(pair) for pair in combinations(("dp", "tp", "cp", "pp"), 2)}


@pytest.mark.parametrize(
    ("world_size", "mixers"),
    [pytest.param(size, mixers, id=f"{size}-{mixers.name}") for size, mixers in FAST.items()]
    + [
        pytest.param(size, EVERY_MIXER, id=f"{size}-{EVERY_MIXER.name}", marks=pytest.mark.slow)
        for size in MESHES
        if FAST.get(size) != EVERY_MIXER
    ],
)
def test_mixers_agree_with_one_process_on_every_pair_of_axes(world_size: int, mixers: Case):
    for found in compared(world_size, cases(world_size, mixers), {})[0].values():
        assert_agrees(found)
