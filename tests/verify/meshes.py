"""The comparison of `megalin verify` for many cases in one group of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megalin.layers.mixers.base import MixerConfig
from megalin.parallel.mesh import Mesh, ParallelConfig
from megalin.parallel.process_group import compute_device
from megalin.verify.case import Case
from megalin.verify.comparison import TensorError
from megalin.verify.run import verify
from tests.cases import GLU, REPRESENTATIVES, model
from tests.cases import Case as MixerCase


def every_mixer(**fields: Any) -> MixerCase:
    """A model of three blocks, so that two stages are uneven, with a sub-layer of each mixer."""
    blocks: list[list[MixerConfig]] = [[], [], []]
    for number, case in enumerate(REPRESENTATIVES):
        blocks[number % len(blocks)] += [s for s in case.model.layers[0].sublayers if s.type != GLU["type"]]
    return MixerCase("every mixer", model(*({"sublayers": [*sublayers, GLU]} for sublayers in blocks), **fields))


def verify_all(cases: Sequence[Case]) -> list[list[TensorError]]:
    """`verify` of each case; cases with equal axes share a mesh, as hundreds of process groups would take minutes."""
    meshes: dict[ParallelConfig, Mesh] = {}
    results = []
    for case in cases:
        if case.parallel not in meshes:
            meshes[case.parallel] = Mesh(case.parallel, compute_device())
        results.append(verify(case, meshes[case.parallel]))
    return results
