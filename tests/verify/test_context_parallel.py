"""Context parallelism as `megalin verify` compares it: logits, losses, every gradient, weights after a step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from megalin.errors import ConfigError
from megalin.layers.config import config_class, mixer_types
from megalin.parallel.config import ParallelConfig
from megalin.verify.case import Case, make_batches, make_case
from megalin.verify.comparison import TensorError, kind
from megalin.verify.run import FaultResult, self_test
from tests.cases import CASES, GLU, MAMBA2, REPRESENTATIVES, model
from tests.cases import Case as MixerCase
from tests.encoder_cases import CASES as ENCODERS
from tests.ranks import run_ranks
from tests.verify.meshes import every_mixer, joined, verify_all

LENGTH = 72
"""Several chunks; cp and tp of every mesh divide it."""


def supported_cases() -> list[MixerCase]:
    """The cases all of whose sub-layers support context parallelism."""
    return [
        case
        for case in CASES
        if all(s.supports_context_parallel for _, block in case.model.blocks() for s in block.sublayers)
    ]


def attention_case(num_heads: int, num_key_value_heads: int) -> MixerCase:
    mixer = {"type": "softmax", "num_heads": num_heads, "num_key_value_heads": num_key_value_heads}
    return MixerCase(f"softmax of {num_heads} heads", model({"sublayers": [mixer, GLU]}))


MIXER_CASES = supported_cases()


def by_name(*names: str) -> list[MixerCase]:
    cases = {case.name: case for case in MIXER_CASES}
    return [cases[name] for name in names]


WITH_HALO = [case for case in MIXER_CASES if case.cp is not None and case.cp.halos]
"""Convolutions and windows, whose halo covers several ranks if shards are short."""
GROUPED = [attention_case(8, 2), attention_case(6, 3)]
"""Key heads that 4 ranks have to repeat, and query heads that 4 ranks do not divide, so keys are gathered."""
GROUPED_KEYS = [MixerCase("mamba2 of 4 groups", model({"sublayers": [MAMBA2 | {"num_groups": 4}], "repeat": 2}))]
"""Groups of heads with a B and C of their own, which tensor parallelism shards."""
WITH_FOLD = by_name("tnl", "rodimus_plus", "mamba2", "cosformer2")
"""A fixed decay, input-dependent decays a key and a head, and no decay."""

FAST_ENCODERS = [case for case in ENCODERS if case.name not in ("one-head", "bert", "rotary")]
"""X^T X, windows, both pools, and both directions."""


def mesh_case(
    mixer_case: Any, *, dp: int = 1, length: int = LENGTH, dtype: Any = "float64", recompute: bool = False, **axes: Any
) -> Case:
    """The comparison of a mixer case, at full size, on a mesh."""
    options = {"data_size": dp, "dtype": dtype, "full": True, "length": length, "recompute": recompute}
    return make_case(mixer_case.model, ParallelConfig(**axes), **options)


Named = dict[str, Case]


def named(mixer_cases: Iterable[Any], **options: Any) -> Named:
    """Comparisons of the cases on one mesh, by the name that a failure prints."""
    return {f"{case.name}, {options}": mesh_case(case, **options) for case in mixer_cases}


FAST_CASES_OF = {
    3: named([every_mixer()], cp=3, recompute=True)
    | named(FAST_ENCODERS, cp=3, length=36, recompute=True)
    | named([joined("folds", WITH_FOLD)], cp=3, cp_exchange="ring"),
    4: named([joined("halos", WITH_HALO)], cp=4, length=8)
    | named([joined("softmax of 8 and of 6 heads", GROUPED)], cp=4, length=12)
    | named(GROUPED_KEYS, cp=2, tp=2, length=12)
    # Windows wider than a shard, and windows none of which crosses shards.
    | named(ENCODERS[2:3], cp=4, length=12)
    | named(ENCODERS[2:3], cp=4, length=32),
}
"""By world size, with cp 3: two ranks cannot show a wrong decay, as the state that enters the first is zero."""
SLOW_CASES_OF = {
    3: named(MIXER_CASES, cp=3, recompute=True)
    | named([case for case in ENCODERS if case not in FAST_ENCODERS], cp=3, length=36, recompute=True),
    4: named(REPRESENTATIVES, cp=2, tp=2, sequence_parallel=True)
    | named(WITH_HALO, cp=4, length=8)
    | named(WITH_FOLD, cp=4, cp_exchange="ring", recompute=True)
    | named(GROUPED_KEYS, tp=4, sequence_parallel=True)
    | named(ENCODERS[-1:], cp=4, cp_exchange="ring", length=36)
    | named(ENCODERS, cp=2, tp=2, sequence_parallel=True, length=36),
}
"""More variants of mixers, each alone, and a second axis, which test_three_axes.py has in one model of all mixers."""
CASES_OF = {size: FAST_CASES_OF[size] | SLOW_CASES_OF[size] for size in FAST_CASES_OF}


def _verify(cases: list[Case], faulty: list[Case]) -> tuple[list[list[TensorError]], list[list[FaultResult]]]:
    return verify_all(cases), [self_test(case) for case in faulty]


def compared(
    world_size: int, cases: Named, faulty: Named
) -> tuple[dict[str, list[TensorError]], dict[str, list[FaultResult]]]:
    """Compares every case in one group of ranks, whose start takes longer than a case."""
    arguments = list(cases.values()), list(faulty.values())
    errors, faults = run_ranks(world_size, _verify, *arguments, timeout=600.0)[0]
    return dict(zip(cases, errors, strict=True)), dict(zip(faulty, faults, strict=True))


def of_blocks(case: Any, blocks: slice) -> Any:
    """The case with some of its blocks, one of each kind: one fault costs as much as a comparison."""
    layers = [layer.model_copy(update={"repeat": 1}) for layer in case.model.layers[blocks]]
    return case._replace(model=case.model.model_copy(update={"layers": layers}))


FAST_FAULTY_CASES = named([of_blocks(case, slice(1)) for case in by_name("rodimus_plus", "softmax")], cp=3) | named(
    [of_blocks(ENCODERS[2], slice(1, None))._replace(name="shifted")], cp=3, length=36
)
SLOW_FAULTY_CASES = (
    named(ENCODERS[2:3], cp=3, length=36)
    | named(by_name("tnl", "cosformer2"), cp=3)
    | named(by_name("tnl"), cp=3, cp_exchange="ring")
    | named(ENCODERS[-1:], cp=3, length=36)
)
FAULTY_CASES = FAST_FAULTY_CASES | SLOW_FAULTY_CASES


class Groups:
    """Comparisons of the selected tests, in one group of ranks a world size, started when the first test needs it."""

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


def assert_agrees(errors: list[TensorError]) -> None:
    kinds = {kind(error.name) for error in errors}
    assert kinds >= {"loss", "grad_norm", "gradient", "weight"}
    assert "sequence_logits" in kinds or kinds >= {"logits", "decoding"}
    assert [error for error in errors if not error.passed] == []


@pytest.mark.parametrize(
    ("world_size", "name"),
    [(size, name) for size in FAST_CASES_OF for name in FAST_CASES_OF[size]]
    + [pytest.param(size, name, marks=pytest.mark.slow) for size in SLOW_CASES_OF for name in SLOW_CASES_OF[size]],
)
def test_every_mixer_and_encoder_agrees_with_one_process(groups: Groups, world_size: int, name: str):
    assert_agrees(groups.compared(world_size)[0][name])


def types_of(cases: Iterable[MixerCase]) -> set[str]:
    return {sublayer.type for case in cases for _, block in case.model.blocks() for sublayer in block.sublayers}


def types_with_context_parallelism() -> set[str]:
    """The decoder's mixers of the package that support context parallelism."""
    configs = {kind: config_class(kind) for kind in mixer_types()}
    return {kind for kind, config in configs.items() if config.attends_to != "all" and config.supports_context_parallel}


def test_cases_have_every_mixer():
    assert types_of(MIXER_CASES) == types_of(REPRESENTATIVES) == types_with_context_parallelism()


def test_documents_start_at_and_next_to_the_first_tokens_of_shards():
    """A document over all ranks; starts at a shard's first token, one before and one after; short documents."""
    for cp in (3, 4):
        first = LENGTH // cp
        starts = [
            (row.diff().nonzero().flatten() + 1).tolist()
            for batch in make_batches(mesh_case(MIXER_CASES[0], cp=cp))
            for row in batch.document_ids
        ]
        assert starts == [[], [first], [first - 1, 2 * first + 1], [first + 1, first + 2, 3 * first - 1]]


FOLDED = ["dropped_decay", "wrong_neighbour", "missing_adjoint"]
WINDOWED = ["local_sum", "missing_sum_adjoint", "missing_neighbours", "missing_neighbour_adjoint"]
FAULTS_OF = {
    "tnl": FOLDED,
    "rodimus_plus": [*FOLDED, "missing_halo", "missing_halo_adjoint"],
    "cosformer2": FOLDED,  # the decays of TPE
    "softmax": ["swapped_split_order", "missing_exchange_adjoint"],
    "shifted": WINDOWED,
    "local": WINDOWED,
    "two-way": [*FOLDED, "local_sum", "missing_sum_adjoint"],
}
"""By case: a fixed decay; an input-dependent one with a convolution and a window; TPE's; heads; an encoder's sums; both
directions, and sums of heads."""


@pytest.mark.parametrize(
    "faulty", [*FAST_FAULTY_CASES, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW_FAULTY_CASES)]
)
def test_every_planted_fault_that_a_model_can_have_is_seen(groups: Groups, faulty: str):
    results = groups.compared(3)[1][faulty]
    name = faulty.partition(",")[0]
    decoding = [] if name in ("shifted", "local", "two-way") else ["forgotten_prompt", "step_without_residual"]
    assert [result.fault for result in results] == ["local_count", *FAULTS_OF[name], *decoding]
    assert [result.fault for result in results if not result.seen] == []
    assert all(result.worst.error > 100 * result.worst.bound for result in results)


def test_length_of_all_ranks_beyond_the_positions_is_refused():
    with pytest.raises(ConfigError, match=r"--length 44: the model has model.max_positions = 40"):
        mesh_case(ENCODERS[0], cp=2, length=44)
