"""Context parallelism by the proof command's own comparison: logits, losses, every gradient, weights after a step."""

from __future__ import annotations

from typing import Any

import pytest

from megalin.errors import ConfigError
from megalin.model.presets import load_preset
from megalin.parallel.mesh import ParallelConfig
from megalin.verify.case import Case, make_batches, make_case
from megalin.verify.comparison import Row, kind
from megalin.verify.run import self_test, verify
from tests.cases import CASES
from tests.cases import Case as MixerCase
from tests.ranks import run_ranks

LENGTH = 72
"""Several chunks in a row; cp and tp of every mesh divide it."""
MESHES: dict[int, list[dict[str, Any]]] = {
    2: [{"cp": 2}],
    4: [{"cp": 4, "shard": 2}, {"cp": 2, "tp": 2}, {"cp": 2, "tp": 2, "sequence_parallel": True}, {"cp": 2, "dp": 2}],
    6: [{"cp": 3, "tp": 2, "sequence_parallel": True}, {"cp": 3, "dp": 2, "shard": 1}],
}
"""World size: meshes beside cp 3. Two ranks cannot see a wrong transition: the state that enters the first is zero."""


def split_rows() -> list[MixerCase]:
    """The rows whose every sub-layer splits the sequence."""
    return [
        case for case in CASES if all(s.splits_sequence for _, block in case.model.blocks() for s in block.sublayers)
    ]


ROWS = split_rows()
ONE_A_MIXER = [
    row for row in ROWS if row.name in ("transnormer-cosine", "tnl", "cosformer2", "hgrn2", "rodimus_plus", "mamba2")
]


def mesh_case(
    row: MixerCase, *, dp: int = 1, length: int = LENGTH, dtype: Any = "float64", recompute: bool = False, **axes: Any
) -> Case:
    """The row as it is on a mesh."""
    options = {"data_size": dp, "dtype": dtype, "full": True, "length": length, "recompute": recompute}
    return make_case(row.model, ParallelConfig(**axes), **options)


def _verify(cases: list[Case]) -> list[list[Row]]:
    return [verify(case) for case in cases]


def test_rows_hold_every_mixer_with_a_state():
    types = {sublayer.type for row in ROWS for _, block in row.model.blocks() for sublayer in block.sublayers}
    assert types == {"transnormer", "tnl", "cosformer2", "hgrn2", "rodimus", "mamba2", "shared_key_attention", "glu"}


def assert_rows_agree(rows: list[MixerCase], world_size: int, meshes: list[dict[str, Any]]) -> None:
    """Each row on each mesh agrees with one process."""
    names = [(row.name, mesh) for mesh in meshes for row in rows]
    cases = [mesh_case(row, **mesh) for mesh in meshes for row in rows]
    for name, found in zip(names, run_ranks(world_size, _verify, cases, timeout=300.0)[0], strict=True):
        kinds = {kind(row.name) for row in found}
        assert kinds == {"logits", "token_losses", "loss", "grad_norm", "gradient", "weight"}
        assert [row for row in found if not row.passed] == [], name


def test_every_row_agrees_with_one_process():
    assert_rows_agree(ROWS, 3, [{"cp": 3, "recompute": True}])


def test_every_mixer_agrees_with_one_process_beside_sequence_parallelism():
    assert_rows_agree(ONE_A_MIXER, 4, [{"cp": 2, "tp": 2, "sequence_parallel": True}])


@pytest.mark.slow
@pytest.mark.parametrize("world_size", MESHES)
def test_every_row_agrees_with_one_process_on_every_mesh(world_size: int):
    assert_rows_agree(ROWS, world_size, MESHES[world_size])


def test_documents_lie_at_and_beside_the_edges_of_shards():
    """One over all ranks, one that starts with a shard, ends one token before and after an edge, short ones."""
    for cp in (3, 4):
        edge = LENGTH // cp
        starts = [
            (row.diff().nonzero().flatten() + 1).tolist()
            for batch in make_batches(mesh_case(ROWS[0], cp=cp))
            for row in batch.document_ids
        ]
        assert starts == [[], [edge], [edge - 1, 2 * edge + 1], [edge + 1, edge + 2, 3 * edge - 1]]


def test_shards_shorter_than_the_convolution_or_the_window_reach_several_ranks_back():
    rows = [row for row in ROWS if row.name in ("rodimus", "mamba2", "rodimus_plus")]
    for found in run_ranks(4, _verify, [mesh_case(row, cp=4, length=8) for row in rows])[0]:
        assert [row for row in found if not row.passed] == []


@pytest.mark.parametrize("name", ["tnl", "rodimus"])
def test_every_planted_fault_of_the_axis_is_seen(name: str):
    """A fixed decay, and one that the input selects."""
    row = next(row for row in ROWS if row.name == name)
    results = run_ranks(3, self_test, mesh_case(row, cp=3))[0]
    assert [result.fault for result in results] == [
        "local_count",
        "dropped_decay",
        "wrong_neighbour",
        "missing_adjoint",
    ]
    assert [result.fault for result in results if not result.seen] == []
    assert all(result.worst.error > 100 * result.worst.bound for result in results)


def test_encoder_is_refused():
    with pytest.raises(ConfigError, match=r'model\.kind = "encoder": an encoder needs the whole sequence on each rank'):
        mesh_case(MixerCase("encoder", load_preset("danet-small").model), cp=2, length=16)
