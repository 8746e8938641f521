"""Pipeline parallelism as `megalin verify` compares it: logits, losses, every gradient, weights after a step."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch

from megalin.__main__ import main
from megalin.model.config import ModelConfig
from megalin.model.pipeline_stages import plan_stages
from megalin.model.presets import load_preset
from megalin.parallel.config import ParallelConfig
from megalin.verify.case import Case, make_case
from megalin.verify.comparison import kind
from megalin.verify.outcome import _merge
from megalin.verify.run import self_test
from tests.cases import CASES, REPRESENTATIVES
from tests.cases import Case as MixerCase
from tests.ranks import run_ranks
from tests.verify.meshes import every_mixer, verify_all
from tests.verify.test_context_parallel import types_of, types_with_context_parallelism

LENGTH = 72
SPLITS_BACKWARD = torch.__version__ >= (2, 13)


class Layout(NamedTuple):
    """A mesh, its schedule, and the names of the mixer cases compared on it."""

    names: tuple[str, ...]
    axes: dict[str, Any]
    dp: int = 1
    recompute: bool = False


EVERY_MIXER = tuple(case.name for case in REPRESENTATIVES)

LAYOUTS = {
    2: [
        Layout(
            ("transnormer-cosine", "hgrn2"), {"pp_schedule": "interleaved", "pp_stages_per_rank": 2}, recompute=True
        ),
        Layout(("hgrn2", "sockets"), {}, recompute=True),
    ],
    4: [
        Layout(("transnormer",), {"pp": 4}),
        Layout(("tnl",), {"tp": 2, "sequence_parallel": True}),
        Layout(("sockets",), {"tp": 2}),
        Layout(("cosformer2",), {"shard": 1}, dp=2),
        Layout(("hgrn2-fla",), {"pp_schedule": "interleaved", "pp_stages_per_rank": 2}, dp=2, recompute=True),
    ],
}
"""By world size; pp = 2 by default."""
EVERY_MIXER_LAYOUTS = [Layout(EVERY_MIXER, {"tp": 2}), Layout(EVERY_MIXER, {}, dp=2), Layout(EVERY_MIXER, {"cp": 2})]
"""Of four ranks. test_three_axes.py has every mixer in one model on more axes."""
INTERLEAVED = Layout(("hgrn2",), {"pp": 4, "pp_schedule": "interleaved", "pp_stages_per_rank": 2})
"""Nine blocks on four ranks; test_stages_of_one_sublayer_agree_with_one_process has fewer."""
SPLIT_BACKWARD = {
    2: [
        Layout(("rodimus_plus",), {"pp_schedule": "zero_bubble", "pp_stages_per_rank": 2}),
        Layout(("tnl",), {"pp_schedule": "zero_bubble"}),
    ],
    4: [
        Layout(("transnormer",), {"tp": 2, "pp_schedule": "zero_bubble", "pp_stages_per_rank": 2}),
        Layout(("tnl",), {"pp_schedule": "zero_bubble", "pp_stages_per_rank": 2}, dp=2),
        Layout(("cosformer2",), {"cp": 2, "pp_schedule": "zero_bubble"}),
    ],
}
MORE_SPLIT_BACKWARD = [
    Layout(("transnormer-cosine",), {"pp_schedule": "zero_bubble", "pp_stages_per_rank": 2}),
    Layout(("mamba2",), {"pp_schedule": "zero_bubble"}),
]


def deep(mixer_case: MixerCase, layers: int) -> MixerCase:
    """The case with at least `layers` blocks, the additional ones of the first kind."""
    more = layers - mixer_case.model.num_layers
    if more <= 0:
        return mixer_case
    first, *rest = mixer_case.model.layers
    first = first.model_copy(update={"repeat": first.repeat + more})
    return mixer_case._replace(model=mixer_case.model.model_copy(update={"layers": [first, *rest]}))


def splits_a_block(model: ModelConfig, parallel: ParallelConfig) -> bool:
    """Whether a stage starts inside a block."""
    plan = plan_stages(model, parallel.pp * parallel.pp_stages_per_rank, num_ranks=parallel.pp, length=LENGTH)
    return any(plan.places[numbers.start][1] > 0 for numbers in plan.sublayers)


def mesh_case(mixer_case: MixerCase, *, dp: int = 1, recompute: bool = False, pp: int = 2, **axes: Any) -> Case:
    """The comparison of a mixer case on a mesh, with as many blocks as stages or a few more, so that stages split a
    block. If no number of blocks does, one block more than stages, so that stages are uneven."""
    parallel = ParallelConfig(pp=pp, **axes)
    options: dict[str, Any] = {"dtype": "float64", "full": True, "length": LENGTH}
    num_stages = parallel.pp * parallel.pp_stages_per_rank
    models = [deep(mixer_case, num_stages + more).model for more in (1, 0, 2, 3, 4)]
    model = next((model for model in models if splits_a_block(model, parallel)), models[0])
    return make_case(model, parallel, data_size=dp, recompute=recompute, **options)


def assert_agree(world_size: int, cases: list[Case]) -> None:
    """Asserts that each case agrees with one process in every tensor."""
    for case, errors in zip(cases, run_ranks(world_size, verify_all, cases, timeout=300.0)[0], strict=True):
        assert {kind(error.name) for error in errors} == {
            "logits",
            "decoding",
            "token_losses",
            "loss",
            "grad_norm",
            "gradient",
            "weight",
        }
        assert [error for error in errors if not error.passed] == [], case


def cases_of(layouts: list[Layout]) -> list[Case]:
    by_name = {mixer_case.name: mixer_case for mixer_case in CASES}
    return [
        mesh_case(by_name[name], dp=layout.dp, recompute=layout.recompute, **layout.axes)
        for layout in layouts
        for name in layout.names
    ]


def test_stages_split_a_block_of_every_case_with_several_sublayers_a_block():
    """So the comparisons of this file include stages with parts of blocks."""
    cases = [mesh_case(mixer_case) for mixer_case in CASES]
    for layouts in (
        *LAYOUTS.values(),
        EVERY_MIXER_LAYOUTS,
        [INTERLEAVED],
        *SPLIT_BACKWARD.values(),
        MORE_SPLIT_BACKWARD,
    ):
        cases += cases_of(layouts)
    for case in cases:
        several = any(len(block.sublayers) > 1 for block in case.model.layers)
        assert isinstance(case.model, ModelConfig)
        assert splits_a_block(case.model, case.parallel) == several, case


def test_cases_with_another_axis_have_every_mixer():
    cases = [mixer_case for mixer_case in CASES if mixer_case.name in EVERY_MIXER]
    assert types_of(cases) == types_with_context_parallelism()


def test_every_mixer_agrees_with_one_process_on_two_stages():
    """The cases with blocks of several kinds, and the one without dtype conversions between its stages."""
    several = [mixer_case for mixer_case in CASES if mixer_case.name in ("hybrid", "norms", "rodimus")]
    assert_agree(2, [mesh_case(mixer_case) for mixer_case in [every_mixer(), *several]])


@pytest.mark.slow
def test_every_case_agrees_with_one_process_on_two_stages():
    assert_agree(2, [mesh_case(mixer_case) for mixer_case in CASES])


@pytest.mark.parametrize("world_size", LAYOUTS)
def test_stages_agree_with_one_process_on_every_mesh(world_size: int):
    assert_agree(world_size, cases_of(LAYOUTS[world_size]))


@pytest.mark.slow
def test_stages_of_every_mixer_agree_with_one_process_on_more_meshes():
    assert_agree(4, cases_of([*EVERY_MIXER_LAYOUTS, INTERLEAVED]))


@pytest.mark.skipif(not SPLITS_BACKWARD, reason="torch loses gradients of weights in a split backward")
@pytest.mark.parametrize(
    ("world_size", "layouts"),
    [
        *(pytest.param(size, layouts, id=str(size)) for size, layouts in SPLIT_BACKWARD.items()),
        pytest.param(2, MORE_SPLIT_BACKWARD, id="more", marks=pytest.mark.slow),
    ],
)
def test_gradients_of_weights_taken_apart_agree_with_one_process(world_size: int, layouts: list[Layout]):
    assert_agree(world_size, cases_of(layouts))


@pytest.mark.parametrize("mixer", ["hgrn2", pytest.param("rodimus_plus", marks=pytest.mark.slow)])
def test_stages_of_one_sublayer_agree_with_one_process(mixer: str):
    """The largest possible number of stages, twice the layers: some have only a GLU."""
    parallel = ParallelConfig(pp=4, pp_schedule="interleaved", pp_stages_per_rank=2)
    (model,) = (deep(mixer_case, 4).model for mixer_case in CASES if mixer_case.name == mixer)
    case = make_case(model, parallel, data_size=1, dtype="float64", full=True, length=LENGTH, recompute=False)
    assert_agree(4, [case])


def test_every_planted_fault_of_the_axis_is_seen():
    mixer_case = next(mixer_case for mixer_case in CASES if mixer_case.name == "hgrn2")
    results = run_ranks(2, self_test, mesh_case(mixer_case))[0]
    assert [result.fault for result in results] == [
        "unsummed_copies",
        "reversed_blocks",
        "count_of_one_micro_batch",
        "forgotten_prompt",
        "step_without_residual",
    ]
    assert [result.fault for result in results if not result.seen] == []
    assert not any(result.worst.error <= 100 * result.worst.bound for result in results)  # NaN if copies differ


def test_copies_that_differ_fail():
    """A comparison of only the first stage's copy would miss an error of another stage's."""
    merged = _merge([{"gradient:a": torch.ones(2), "gradient:b": torch.ones(2)}, {"gradient:a": torch.zeros(2)}])
    assert merged["gradient:a"].isnan().all()
    assert merged["gradient:b"].equal(torch.ones(2))


def test_shrunk_model_has_a_block_more_than_stages():
    case = make_case(
        load_preset("hgrn2-1b").model,
        ParallelConfig(pp=2, pp_schedule="interleaved", pp_stages_per_rank=2),
        data_size=1,
        dtype="float64",
        full=False,
        length=None,
        recompute=False,
    )
    assert case.model.num_layers == 5
    assert case.num_micro_batches == 4


def test_command_takes_stages():
    """The command starts its own ranks."""
    schedule = ["parallel.pp_schedule=interleaved", "parallel.pp_stages_per_rank=2"]
    assert main(["verify", "tnl-70m", "parallel.pp=2", *schedule, "--json"]) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["parallel.pp=2", "parallel.pp_schedule=interleaved"], "which runs several stages a rank"),
        (["parallel.pp=5", "--full", "model.layers.0.repeat=2"], "5 stages are more than the 4 into which the model"),
        (["parallel.pp=2", "parallel.pp_schedule=zero_bubble", "train.recompute=true"], "recomputation would run"),
    ],
)
def test_command_refuses(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    assert main(["verify", "tnl-70m", *arguments]) == 2
    assert message in capsys.readouterr().err
