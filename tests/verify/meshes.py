"""The comparison of `megalin verify` for many cases in one group of ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from megalin.layers.config import MixerConfig
from megalin.parallel.config import ParallelConfig
from megalin.parallel.mesh import Mesh
from megalin.parallel.process_group import compute_device
from megalin.verify.case import Case
from megalin.verify.comparison import TensorError
from megalin.verify.run import verify
from tests.cases import GLU, REPRESENTATIVES, model
from tests.cases import Case as MixerCase


def joined(name: str, cases: Iterable[MixerCase], *, num_blocks: int = 2, **fields: Any) -> MixerCase:
    """One model with the mixers of the cases' first blocks: its start and its step cost less than those of as many
    models, and an error of a mixer shows in the gradients of its own weights."""
    blocks: list[list[MixerConfig]] = [[] for _ in range(num_blocks)]
    for number, case in enumerate(cases):
        blocks[number % num_blocks] += [s for s in case.model.layers[0].sublayers if s.type != GLU["type"]]
    return MixerCase(name, model(*({"sublayers": [*sublayers, GLU]} for sublayers in blocks), **fields))


def every_mixer(**fields: Any) -> MixerCase:
    """A model of three blocks, so that two stages are uneven, with a sub-layer of each mixer."""
    return joined("every mixer", REPRESENTATIVES, num_blocks=3, **fields)


def verify_all(cases: Sequence[Case]) -> list[list[TensorError]]:
    """`verify` of each case; cases with equal axes share a mesh, as hundreds of process groups would take minutes."""
    meshes: dict[ParallelConfig, Mesh] = {}
    results = []
    for case in cases:
        if case.parallel not in meshes:
            meshes[case.parallel] = Mesh(case.parallel, compute_device())
        results.append(verify(case, meshes[case.parallel]))
    return results
