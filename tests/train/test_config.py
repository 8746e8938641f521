"""The run's config: tables that must agree with each other and with the number of ranks, and their errors."""

from __future__ import annotations

from pathlib import Path

import pytest

from megalin.errors import ConfigError
from megalin.parallel.config import ParallelConfig
from megalin.train.config import load_run_config
from megalin.train.launch_checks import check_launch, check_model
from tests.encoder_cases import CASES as ENCODERS
from tests.mixers import decaying_sum
from tests.model_runs import write_config


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(tmp_path_factory.mktemp("config"))


def message(path: Path, *overrides: str, world_size: int = 1) -> str:
    with pytest.raises(ConfigError) as raised:
        check_launch(load_run_config(path, overrides), world_size)
    return str(raised.value)


def test_all_disagreements_are_reported_at_once(path):
    lines = message(
        path,
        "train.micro_batch_size=3",
        "train.stop_after_steps=20",
        "schedule.warmup_steps=13",
        "parallel.sequence_parallel=true",
        "parallel.tp=8",
    ).splitlines()
    assert lines[0] == f"{path}: 4 problem(s)"
    assert [line.split(" = ")[0].strip() for line in lines[1:]] == [
        "schedule.warmup_steps",
        "train.global_batch_size",
        "data.sequence_length",
        "train.stop_after_steps",
    ]


@pytest.mark.parametrize(
    ("micro", "total", "world_size", "remedy"),
    [(2, 4, 3, "use 6"), (2, 10, 2, "use 8 or 12"), (1, 7, 4, "use 4 or 8")],
)
def test_batch_that_the_data_axis_does_not_divide(path, micro, total, world_size, remedy):
    overrides = [f"train.micro_batch_size={micro}", f"train.global_batch_size={total}"]
    assert message(path, *overrides, world_size=world_size) == (
        f"train.global_batch_size = {total} is not divisible by train.micro_batch_size = {micro} times the data axis "
        f"of {world_size} ranks; {remedy}"
    )


def test_batch_that_the_groups_of_context_parallel_ranks_do_not_divide(path):
    overrides = ["train.micro_batch_size=1", "train.global_batch_size=4", "parallel.cp=2"]
    assert message(path, *overrides, world_size=6) == (
        "train.global_batch_size = 4 is not divisible by train.micro_batch_size = 1 times the 3 groups of "
        "parallel.cp = 2 ranks that read different samples; use 3 or 6"
    )


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (["parallel.cp=5"], "is not divisible by parallel.cp = 5; use 35 or 40"),
        (
            ["parallel.cp=3", "parallel.tp=8", "parallel.sequence_parallel=true"],
            "is not divisible by parallel.cp = 3 times parallel.tp = 8, as parallel.sequence_parallel needs; use 24 "
            "or 48",
        ),
    ],
)
def test_length_that_the_mesh_does_not_split(path, overrides, problem):
    assert f"data.sequence_length = 36 {problem}" in message(path, *overrides)


def test_window_beyond_the_sequence_is_refused_before_any_rank_starts(path):
    attention = 'model.layers.1.sublayers.0={type = "shared_key_attention", num_heads = 4, window = 37}'
    assert message(path, attention) == (
        "model.layers.1.sublayers.0.window = 37 is wider than the 36 tokens of a sequence; use at most 36, or longer "
        "sequences"
    )
    check_launch(load_run_config(path, [attention.replace("37", "36")]), 1)


def test_sequence_beyond_the_learned_positions_is_refused_before_any_rank_starts(path):
    first = "model.layers.0.sublayers.0"
    assert (
        f"data.sequence_length = 36 is more than {first}.max_positions = 35; lower it, or raise max_positions"
    ) in message(path, f"{first}.absolute_positions=learned", f"{first}.max_positions=35")
    load_run_config(path, [f"{first}.absolute_positions=learned", f"{first}.max_positions=36"])


def test_window_beyond_the_sequences_of_an_encoder_is_refused():
    (encoder,) = (case.model for case in ENCODERS if case.name == "local")
    with pytest.raises(
        ConfigError, match=r"sublayers\.0\.window = 8 is wider than the 7 tokens of a sequence; use at most 7"
    ):
        check_model(encoder, ParallelConfig(), 7)


def test_sizes_of_the_axis_that_an_error_names_divide_all_of_the_model(path):
    """The padded vocabulary would allow 3, 6 and 8; the heads do not. Equal fields of further layers are left out."""
    assert message(path, "parallel.tp=5", world_size=5) == (
        "model.vocab_size padded to a multiple of 128 = 384, model.layers.0.sublayers.0.num_heads = 4, "
        "model.hidden_size = 32 and model.layers.0.sublayers.1.intermediate_size = 48 are not divisible by "
        "parallel.tp = 5; use tp 1, 2, 4"
    )
    (encoder,) = (case.model for case in ENCODERS if case.name == "local")
    with pytest.raises(ConfigError, match=r"= 5; use tp 1, 2, 4$"):
        check_model(encoder, ParallelConfig(tp=5), 24)


def test_problems_of_model_and_batch_are_reported_at_once(path):
    assert message(path, "parallel.tp=8", "train.global_batch_size=6", world_size=16).splitlines() == [
        "2 problems",
        "  train.global_batch_size = 6 is not divisible by train.micro_batch_size = 2 times the data axis of 2 ranks; "
        "use 4 or 8",
        "  model.layers.0.sublayers.0.num_heads = 4 is not divisible by parallel.tp = 8; use tp 1, 2, 4",
    ]


def test_evaluations_without_a_validation_split_are_refused_before_any_rank_starts(path):
    alone = ["data.validation=[]", "train.evaluate_every_steps=2"]
    remedy = "set data.validation, data.validation_fraction or data.split, or leave"
    assert message(path, *alone) == (
        f"train.evaluate_every_steps = 2: no effect without a validation split; {remedy} it out"
    )
    assert message(path, *alone, "train.evaluate_batches=3", "data.split=[9,0,1]") == (
        "train.evaluate_every_steps = 2 and train.evaluate_batches = 3: no effect without a validation split; "
        f"{remedy} them out"
    )
    for split in ("data.validation_fraction=0.1", "data.split=[8,1,1]"):
        check_launch(load_run_config(path, [*alone, split]), 1)


def test_mixer_that_needs_the_whole_sequence_is_refused_before_any_rank_starts(path):
    toy = f'model.layers.0.sublayers.0={{type = "{decaying_sum.TYPE}"}}'
    assert message(path, toy, "parallel.cp=2", world_size=2) == (
        f'model.layers.0.sublayers.0.type = "{decaying_sum.TYPE}": this mixer needs the full sequence on each rank, '
        "but parallel.cp = 2 shards it; use parallel.cp = 1"
    )


def test_flash_attention_that_cannot_run_on_a_part_of_the_tokens_is_refused_before_any_rank_starts(path):
    softmax = 'model.layers.0.sublayers.0={type = "softmax", num_heads = 4, backend = "flash_attn"}'
    assert message(path, softmax, "parallel.cp=3", world_size=3).endswith(
        'model.layers.0.sublayers.0.backend = "flash_attn" cannot run: parallel.cp = 3 does not divide the 4 query '
        'heads of a rank, so each computes the queries of its own tokens only; use "auto" or "sdpa"'
    )


def test_launch_that_fits_passes(path):
    check_launch(load_run_config(path, ["parallel.cp=3", "parallel.tp=2"]), 12)
    for world_size, overrides in ((1, []), (2, []), (4, ["parallel.tp=2"]), (4, ["parallel.tp=4"])):
        check_launch(load_run_config(path, overrides), world_size)


def test_preset_is_written_out_and_overridden(path):
    config = load_run_config(path, ["model.preset=transnormerllm-1b-64k", "model.layers.0.repeat=3"])
    assert config.model.layers[0].repeat == 3


def test_defaults_stand_in_for_absent_tables(path):
    config = load_run_config(path, [])
    assert (config.parallel.tp, config.schedule.type, config.train.dtype) == (1, "cosine", "float32")


def test_phase_that_never_begins_is_refused(path):
    phase = "data.phases=[{from_step = 12, weights = {train = 1.0}}]"
    assert "data.phases.0.from_step = 12 is not below train.steps = 12; lower it or remove the phase" in message(
        path, phase
    )


@pytest.mark.parametrize("key", ["hang_timeout_seconds", "phase_timeout_seconds"])
def test_limit_of_a_wait_beyond_every_clock_is_refused(path, key):
    assert f"train.{key} = inf: input should be less than or equal to 1000000000" in message(path, f"train.{key}=inf")


def test_what_keeps_a_step_from_being_one_graph(path, tmp_path):
    assert "train.cuda_graphs = true with parallel.pp = 2" in message(
        path, "train.cuda_graphs=true", "parallel.pp=2", world_size=2
    )
    assert 'train.cuda_graphs = true with train.engine = "deepspeed"' in message(
        path, "train.cuda_graphs=true", 'train.engine="deepspeed"'
    )
    layers = [{"sublayers": [{"type": "softmax", "num_heads": 2}, {"type": "glu", "intermediate_size": 48}]}]
    softmax = write_config(tmp_path, model={"layers": layers})
    assert "train.cuda_graphs = true with the mixer softmax" in message(softmax, "train.cuda_graphs=true", world_size=2)
