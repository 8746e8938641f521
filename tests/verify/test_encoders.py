"""Encoders as `megalin verify` compares them: both heads, all gradients, the weights after a step."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest

from megalin.__main__ import main
from megalin.errors import ConfigError
from megalin.model.presets import load_preset
from megalin.parallel.config import ParallelConfig
from megalin.verify.case import Case, make_batches, make_case, shrink, shrunk_length
from megalin.verify.comparison import kind
from megalin.verify.run import self_test
from tests.encoder_cases import CASES, LENGTH
from tests.ranks import run_ranks
from tests.verify.meshes import verify_all

PRESET = load_preset("danet-base").model


class Layout(NamedTuple):
    """A mesh, and the differences from a plain fp64 run."""

    tp: int
    dp: int
    sequence_parallel: bool = False
    recompute: bool = False
    dtype: Any = "float64"


MESHES = {2: [Layout(2, 1, True, True)]}
"""The preset has both axes."""
SLOW_MESHES = {
    1: [Layout(1, 1)],
    2: [Layout(1, 2), Layout(2, 1)],
    4: [
        Layout(2, 2),
        Layout(2, 2, True),
        Layout(4, 1, False, True),
        Layout(4, 1, True),
        Layout(2, 2, True, dtype="float32"),
    ],
    8: [Layout(4, 2), Layout(4, 2, True)],
}


def case_of(model: Any, layout: Layout, *, full: bool = True) -> Case:
    parallel = ParallelConfig(tp=layout.tp, sequence_parallel=layout.sequence_parallel)
    options = {"full": full, "length": LENGTH if full else None, "recompute": layout.recompute, "dtype": layout.dtype}
    return make_case(model, parallel, data_size=layout.dp, **options)


def agree(world_size: int, layouts: list[Layout]) -> None:
    cases = {f"{case.name} on {layout}": case_of(case.model, layout) for layout in layouts for case in CASES}
    compared = run_ranks(world_size, verify_all, list(cases.values()), timeout=250.0)[0]
    for (name, case), errors in zip(cases.items(), compared, strict=True):
        heads = {"sequence_logits", "sequence_losses"}
        if case.model.num_classes is None:
            heads |= {"logits", "token_losses"}
        assert {kind(error.name) for error in errors} == heads | {"loss", "grad_norm", "gradient", "weight"}
        assert [error for error in errors if not error.passed] == [], name


@pytest.mark.parametrize("world_size", MESHES)
def test_every_encoder_agrees_with_one_process(world_size: int):
    agree(world_size, MESHES[world_size])


@pytest.mark.slow
@pytest.mark.parametrize("world_size", SLOW_MESHES)
def test_every_encoder_agrees_with_one_process_on_more_meshes(world_size: int):
    agree(world_size, SLOW_MESHES[world_size])


def test_preset_agrees_on_a_mesh_in_bf16_and_fp64():
    cases = [case_of(PRESET, Layout(2, 2, True, dtype=dtype), full=False) for dtype in ("float64", "bfloat16")]
    for errors in run_ranks(4, verify_all, cases, timeout=250.0)[0]:
        assert [error for error in errors if not error.passed] == []


def test_planted_faults_that_an_encoder_can_have_are_seen():
    results = run_ranks(4, self_test, case_of(CASES[0].model, Layout(2, 2)))[0]
    assert [(result.fault, result.seen) for result in results] == [("skipped_adjoint", True), ("local_count", True)]


def test_batches_hold_padding_and_unequal_counts():
    first, second = make_batches(case_of(PRESET, Layout(2, 2), full=False))
    sizes = [batch.valid.sum(1).tolist() for batch in (first, second)]
    length = shrunk_length(2)
    assert sizes == [[length, length - 5, length // 2, 0], [length // 2, 0, length, length - 5]]
    counts = [batch.label_counts().tolist() for batch in (first, second)]
    assert counts[1][0] < counts[0][0] / 2
    assert [count[1] for count in counts] == [3, 3]


def test_shrunk_preset_keeps_its_kind():
    small = shrink(PRESET, 2)
    assert (small.kind, small.num_layers, small.layers[0].sublayers[0].num_heads) == ("encoder", 2, 1)
    assert small.max_positions > shrunk_length(2)


def test_length_beyond_the_positions_is_refused():
    with pytest.raises(ConfigError, match=r"--length 600: the model has model.max_positions = 512; use"):
        make_case(PRESET, ParallelConfig(), data_size=1, dtype="float64", full=True, length=600, recompute=False)


def test_command_knows_encoders(capsys):
    assert main(["verify", "danet-small", "train.recompute=true"]) == 0
    text = capsys.readouterr().out
    assert "sequence_logits" in text
    assert "PASSED" in text
