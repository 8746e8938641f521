"""Context parallelism by the proof command's own comparison: logits, losses, every gradient, weights after a step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from megalin.errors import ConfigError
from megalin.layers.mixers.base import mixer_types
from megalin.parallel.mesh import ParallelConfig
from megalin.verify.case import Case, make_batches, make_case
from megalin.verify.comparison import TensorError, kind
from megalin.verify.run import FaultResult, self_test
from tests.cases import CASES, GLU, TOY, model
from tests.cases import Case as MixerCase
from tests.encoder_cases import CASES as ENCODERS
from tests.ranks import run_ranks
from tests.verify.meshes import verify_all

LENGTH = 72
"""Several chunks in a row; cp and tp of every mesh divide it."""


def split_rows() -> list[MixerCase]:
    """The rows whose every sub-layer splits the sequence."""
    return [
        case for case in CASES if all(s.splits_sequence for _, block in case.model.blocks() for s in block.sublayers)
    ]


def attention_row(num_heads: int, num_key_value_heads: int) -> MixerCase:
    mixer = {"type": "softmax", "num_heads": num_heads, "num_key_value_heads": num_key_value_heads}
    return MixerCase(f"softmax of {num_heads} heads", model({"sublayers": [mixer, GLU]}))


ROWS = split_rows()


def of_names(*names: str) -> list[MixerCase]:
    by_name = {row.name: row for row in ROWS}
    return [by_name[name] for name in names]


ONE_A_MIXER = of_names("transnormer-cosine", "tnl", "cosformer2", "hgrn2", "rodimus_plus", "mamba2", "softmax-grouped")
REACHING = of_names("rodimus", "mamba2", "rodimus_plus")
"""With convolutions and windows, which reach over several ranks whose tokens are few."""
GROUPED = [attention_row(8, 2), attention_row(6, 3)]
"""Heads of keys that 4 ranks have to repeat, and heads of queries that they do not divide: keys are gathered."""
FOLDING = of_names("tnl", "rodimus_plus", "mamba2", "cosformer2")
"""A fixed decay, decays a key and a head that the input selects, and none."""
FAULTY = of_names("tnl", "rodimus_plus", "cosformer2", "softmax")


def mesh_case(
    row: Any, *, dp: int = 1, length: int = LENGTH, dtype: Any = "float64", recompute: bool = False, **axes: Any
) -> Case:
    """The row as it is on a mesh."""
    options = {"data_size": dp, "dtype": dtype, "full": True, "length": length, "recompute": recompute}
    return make_case(row.model, ParallelConfig(**axes), **options)


Named = dict[str, Case]


def named(rows: Sequence[Any], **options: Any) -> Named:
    """The rows on one mesh, by what a failure should tell."""
    return {f"{row.name}, {options}": mesh_case(row, **options) for row in rows}


CASES_OF = {
    3: named(ROWS, cp=3, recompute=True)
    | named(ENCODERS, cp=3, length=36, recompute=True)
    | named(FOLDING, cp=3, cp_exchange="ring"),
    4: named(ONE_A_MIXER, cp=2, tp=2, sequence_parallel=True)
    | named(REACHING, cp=4, length=8)
    | named(FOLDING, cp=4, cp_exchange="pipelined", recompute=True)
    | named(GROUPED, cp=4, length=12)
    | named(ENCODERS, cp=2, tp=2, sequence_parallel=True, length=36)
    # Windows wider than what a rank has, and windows of which none crosses a border.
    | named(ENCODERS[2:3], cp=4, length=12)
    | named(ENCODERS[2:3], cp=4, length=32),
}
"""By world size. Two ranks cannot see a wrong transition, since the state that enters the first is zero: cp 3 is in."""


def _verify(cases: list[Case], faulty: list[Case]) -> tuple[list[list[TensorError]], list[list[FaultResult]]]:
    return verify_all(cases), [self_test(case) for case in faulty]


def compared(
    world_size: int, cases: Named, faulty: Named
) -> tuple[dict[str, list[TensorError]], dict[str, list[FaultResult]]]:
    """Every case in one group of ranks, whose start costs more than a case."""
    arguments = list(cases.values()), list(faulty.values())
    rows, faults = run_ranks(world_size, _verify, *arguments, timeout=600.0)[0]
    return dict(zip(cases, rows, strict=True)), dict(zip(faulty, faults, strict=True))


FAULTY_CASES = (
    named(FAULTY, cp=3)
    | named([row for row in FAULTY if row.name == "tnl"], cp=3, cp_exchange="pipelined")
    | named(ENCODERS[2:3], cp=3, length=36)
)


class Groups:
    """What the chosen tests compare, by world size: one group of ranks each, started when the first test asks."""

    def __init__(self, items: Iterable[pytest.Item]) -> None:
        chosen = [
            item.callspec.params for item in items if isinstance(item, pytest.Function) and hasattr(item, "callspec")
        ]
        self.cases = {(params.get("world_size"), params.get("name")) for params in chosen}
        self.faulty = {params["faulty"] for params in chosen if "faulty" in params}
        self.found: dict[int, tuple[dict[str, list[TensorError]], dict[str, list[FaultResult]]]] = {}

    def compared(self, world_size: int) -> tuple[dict[str, list[TensorError]], dict[str, list[FaultResult]]]:
        if world_size not in self.found:
            cases = {name: case for name, case in CASES_OF[world_size].items() if (world_size, name) in self.cases}
            faulty = {name: case for name, case in FAULTY_CASES.items() if world_size == 3 and name in self.faulty}
            self.found[world_size] = compared(world_size, cases, faulty)
        return self.found[world_size]


@pytest.fixture(scope="module")
def groups(request: pytest.FixtureRequest) -> Groups:
    return Groups(item for item in request.session.items if item.path == request.path)


def assert_agrees(rows: list[TensorError]) -> None:
    assert {kind(row.name) for row in rows} >= {"loss", "grad_norm", "gradient", "weight"}
    assert {kind(row.name) for row in rows} & {"logits", "sequence_logits"}
    assert [row for row in rows if not row.passed] == []


@pytest.mark.parametrize(("world_size", "name"), [(size, name) for size in CASES_OF for name in CASES_OF[size]])
def test_every_mixer_and_encoder_agrees_with_one_process(groups: Groups, world_size: int, name: str):
    assert_agrees(groups.compared(world_size)[0][name])


def types_of(rows: Iterable[MixerCase]) -> set[str]:
    return {sublayer.type for row in rows for _, block in row.model.blocks() for sublayer in block.sublayers}


def test_rows_hold_every_mixer():
    assert types_of(ROWS) | {"dense_attention"} == set(mixer_types())
    assert types_of(ONE_A_MIXER) | {"dense_attention"} == set(mixer_types()) - {TOY["type"]}


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


FOLDED = ["dropped_decay", "wrong_neighbour", "missing_adjoint"]
FAULTS_OF = {
    "tnl": FOLDED,
    "rodimus_plus": [*FOLDED, "missing_halo", "missing_halo_adjoint"],
    "cosformer2": FOLDED,  # the decays of TPE
    "softmax": ["swapped_split_order", "missing_exchange_adjoint"],
    "local": ["local_sum", "missing_sum_adjoint", "missing_neighbours", "missing_neighbour_adjoint"],
}
"""By row: a fixed decay, one that the input selects with a convolution and a window, heads, an encoder's sums."""


@pytest.mark.parametrize("faulty", FAULTY_CASES)
def test_every_planted_fault_that_a_model_can_have_is_seen(groups: Groups, faulty: str):
    results = groups.compared(3)[1][faulty]
    assert [result.fault for result in results] == ["local_count", *FAULTS_OF[faulty.partition(",")[0]]]
    assert [result.fault for result in results if not result.seen] == []
    assert all(result.worst.error > 100 * result.worst.bound for result in results)


def test_length_of_all_ranks_beyond_the_positions_is_refused():
    with pytest.raises(ConfigError, match=r"--length 44: the model has model.max_positions = 40"):
        mesh_case(ENCODERS[0], cp=2, length=44)
