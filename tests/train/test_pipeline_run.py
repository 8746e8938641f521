"""Runs on pipeline stages: losses of one process, checkpoints across meshes, and refused configs."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from megalin.checkpoint.load import load, newest
from megalin.checkpoint.save import save
from megalin.config import parse
from megalin.data.batch import Batch
from megalin.errors import ConfigError, NumericError, OperandError
from megalin.model.config import ModelConfig
from megalin.model.pipeline_stages import DecoderStage
from megalin.model.presets import load_preset
from megalin.optim.adamw import build_optimizer
from megalin.optim.config import OptimizerConfig
from megalin.parallel.agreement import rank
from megalin.parallel.config import ParallelConfig
from megalin.parallel.mesh import Mesh, check_world_size
from megalin.parallel.tensor_parallel import local
from megalin.train.build import build_model
from megalin.train.config import load_run_config
from megalin.train.launch_checks import check_launch, check_model
from megalin.train.metrics import Metrics
from megalin.train.pipeline_model import Pipeline
from megalin.train.step import train_step
from tests.model_runs import CPU, STEPS, checkpoint_tensors, metrics, model_table, train_here, write_config
from tests.ranks import RankFailedError, run_ranks

MODEL = parse(ModelConfig, model_table(), "test")
ON_STAGES = "parallel.pp=2"
INTERLEAVED = ('parallel.pp_schedule="interleaved"', "parallel.pp_stages_per_rank=2")
HALF = f"train.stop_after_steps={STEPS // 2}"


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two blocks, the second split between two stages, with a tied embedding and four micro-batches a step."""
    layers = model_table()["layers"]
    layers[1]["sublayers"][1]["intermediate_size"] = 64  # so that the second stage gets this sub-layer only
    train = {"micro_batch_size": 1, "evaluate_every_steps": 4}
    saves = {"every_steps": STEPS // 2}
    return write_config(tmp_path_factory.mktemp("run"), model={"layers": layers}, train=train, checkpoint=saves)


@pytest.fixture(scope="module")
def one_process(config: Path) -> Path:
    folder = config.parent / "one"
    run_ranks(1, train_here, config, folder)
    return folder


def assert_same_run(folder: Path, truth: Path) -> None:
    """Asserts equal losses, norms and evaluations of every step, and equal final weights and moments."""
    lines, expected = metrics(folder), metrics(truth)
    assert len(lines) == STEPS
    for line, other in zip(lines, expected, strict=True):
        assert {name: line[name] for name in other} == {
            name: pytest.approx(each, rel=1e-4) for name, each in other.items()
        }
    tensors, others = checkpoint_tensors(folder), checkpoint_tensors(truth)
    assert tensors.keys() == others.keys()
    for name, tensor in tensors.items():
        torch.testing.assert_close(tensor, others[name], rtol=2e-2, atol=2e-4, msg=name)


def printed_lines(config: Path, folder: Path, *overrides: str) -> list[str]:
    """Trains; returns the printed lines."""
    lines: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Metrics, "print_line", lambda _, line: lines.append(line))
        train_here(config, folder, *overrides)
    return lines


def test_run_on_two_stages_is_that_of_one_process(config: Path, one_process: Path):
    folder = config.parent / "stages"
    lines = run_ranks(2, printed_lines, config, folder, ON_STAGES)[0]
    assert_same_run(folder, one_process)
    first, last = (line for line in lines if line.startswith("pipeline stage"))
    assert first.startswith("pipeline stage 0: layers 0 to 1.0 and the embedding")
    assert last.startswith("pipeline stage 1: layers 1.1 to 1 and the head")
    kernels = json.loads((folder / "kernels.json").read_text())
    assert {"decay_scan", "linear_cross_entropy"} <= kernels.keys()  # of the first stage, and of the last


@pytest.mark.parametrize(
    ("world_sizes", "meshes"),
    [
        ((4, 1), ((ON_STAGES,), ())),
        ((1, 2), ((), (ON_STAGES,))),
        pytest.param(
            (4, 4),
            ((ON_STAGES, "parallel.tp=2"), (ON_STAGES, "parallel.cp=2", "parallel.shard=1")),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["sharded_to_one", "one_to_stages", "tp_to_cp"],
)
def test_checkpoint_goes_on_with_another_mesh(
    config: Path, one_process: Path, world_sizes: tuple[int, int], meshes: tuple[tuple[str, ...], ...]
):
    folder = config.parent / "-".join(f"{size}{''.join(mesh)}" for size, mesh in zip(world_sizes, meshes, strict=True))
    run_ranks(world_sizes[0], train_here, config, folder, *meshes[0], HALF)
    run_ranks(world_sizes[1], train_here, config, folder, *meshes[1])
    assert_same_run(folder, one_process)


def step_with_a_nan() -> str:
    """The error of a step on two stages, with NaN weights in the last block."""
    mesh = Mesh(ParallelConfig(pp=2), CPU)
    model = build_model(MODEL, mesh, compute_dtype=torch.float32, recompute=False, compile_blocks=False, seed=0)
    weights = dict(model.named_parameters())
    for name, weight in weights.items():
        if name == "blocks.1.sublayers.1.mixer.down.weight":
            local(weight.detach()).fill_(math.nan)
    before = {name: local(weight.detach()).clone() for name, weight in weights.items()}
    optimizer = build_optimizer(model, OptimizerConfig(lr=1e-3), no_decay=())
    with pytest.raises(NumericError) as raised:
        train_step(model, optimizer, [make_batch(), make_batch()], mesh, max_grad_norm=1.0, step=1).wait()
    assert all(local(weights[name].detach()).equal(kept) for name, kept in before.items() if not kept.isnan().any())
    return str(raised.value)


def test_loss_that_is_not_finite_ends_every_stage_before_a_weight_changes():
    messages = run_ranks(2, step_with_a_nan)
    assert messages[0] == messages[1]
    assert "first in rank 1: blocks.1.sublayers.1.mixer.down.weight (weight)" in messages[0]


def refused_in_a_stage() -> str:
    """The error on this rank if stages reject their input: the first stage's has arrived, the second's never does."""
    mesh = Mesh(ParallelConfig(pp=2), CPU)
    model = build_model(MODEL, mesh, compute_dtype=torch.float32, recompute=False, compile_blocks=False, seed=0)
    assert isinstance(model, Pipeline)
    planted = OperandError("planted")
    with (
        patch.object(DecoderStage, "forward", side_effect=planted),
        pytest.raises((OperandError, RuntimeError)) as raised,
    ):
        model.accumulate_gradients([make_batch(), make_batch()], torch.ones(1))
    return f"{raised.typename}: {raised.value}"


def test_error_of_a_stage_keeps_its_kind():
    assert run_ranks(2, refused_in_a_stage, collective_timeout=2.0)[0] == "OperandError: planted"


def copies_after_two_steps() -> list[list[float]]:
    """Copies on this rank's two stages of the decay bounds that all blocks share."""
    mesh = Mesh(ParallelConfig(pp=2, pp_schedule="interleaved", pp_stages_per_rank=2), CPU)
    block = {"sublayers": [{"type": "hgrn2", "num_heads": 4, "chunk_size": 16}], "repeat": 5}
    config = parse(ModelConfig, model_table() | {"layers": [block]}, "test")
    model = build_model(config, mesh, compute_dtype=torch.float32, recompute=False, compile_blocks=False, seed=0)
    assert isinstance(model, Pipeline)
    optimizer = build_optimizer(model, OptimizerConfig(lr=1e-2), no_decay=())
    for step in (1, 2):
        train_step(model, optimizer, [make_batch(), make_batch()], mesh, max_grad_norm=1.0, step=step).wait()
    copies = [dict(stage.named_parameters())["shared.hgrn2.rows.gamma"] for stage in model.stages()]
    return [local(copy.detach()).flatten().tolist() for copy in copies]


def test_copies_of_a_parameter_stay_equal_on_and_across_ranks():
    first, *others = [copy for copies in run_ranks(2, copies_after_two_steps) for copy in copies]
    assert len(others) == 3
    assert all(copy == first for copy in others)
    assert len(set(first)) > 1  # their initial value is one


def make_batch() -> Batch:
    """Two sequences of one document each."""
    ids = torch.arange(2 * 17).remainder(250).view(2, 17)
    return Batch(ids[:, :-1], ids[:, 1:], torch.zeros(2, 16, dtype=torch.int32), torch.arange(2))


def load_own_tensors(folder: Path, left_out: int) -> None:
    """Loads five of ten tensors of a checkpoint on each rank; rank 1 leaves out some of its own."""
    checkpoint = newest(folder)
    assert checkpoint is not None
    names = [f"blocks.{index}.weight" for index in range(5 * rank(), 5 * rank() + 5)]
    tensors = {name: torch.zeros(3) for name in names[: 5 - left_out * rank()]}
    load(checkpoint, tensors)
    assert all(torch.equal(tensor, torch.full((3,), float(name.split(".")[1]))) for name, tensor in tensors.items())


def test_ranks_load_the_names_that_they_hold(tmp_path: Path):
    save(
        tmp_path,
        step=1,
        tensors={f"blocks.{index}.weight": torch.full((3,), float(index)) for index in range(10)},
        state={},
    )
    run_ranks(2, load_own_tensors, tmp_path, 0)
    with pytest.raises(
        RankFailedError, match=r"blocks\.9\.weight: in the checkpoint with shape \[3\], not in the model"
    ):
        run_ranks(2, load_own_tensors, tmp_path, 1)


def launched(config: Path, world_size: int, *overrides: str) -> None:
    check_launch(load_run_config(config, list(overrides)), world_size)


def test_micro_batches_that_do_not_fill_the_stages_are_refused(config: Path):
    with pytest.raises(ConfigError) as raised:
        launched(config, 2, ON_STAGES, "train.micro_batch_size=4")
    assert str(raised.value) == (
        'parallel.pp_schedule = "1f1b" of parallel.pp = 2 needs at least 2 micro-batches a step, not 1: '
        "train.global_batch_size = 4 is that many times train.micro_batch_size = 4 times dp = 1; use "
        "train.global_batch_size = 8 or a larger multiple of 4, or train.micro_batch_size = 2"
    )
    with pytest.raises(ConfigError, match=r"needs a multiple of 2 micro-batches a step, not 3: "):
        launched(config, 2, ON_STAGES, *INTERLEAVED, "train.global_batch_size=3")


@pytest.mark.parametrize(
    ("schedule", "samples", "micro_batch_size", "dp", "remedy"),
    [
        ((), 8, 4, 2, "16 or a larger multiple of 8, or train.micro_batch_size = 2"),
        ((), 1, 1, 1, "2 or more"),
        (INTERLEAVED, 3, 1, 1, "2 or 4"),
        (INTERLEAVED, 12, 4, 1, "8 or 16, or train.micro_batch_size = 3"),
        (INTERLEAVED, 2, 2, 1, "4, or train.micro_batch_size = 1"),
    ],
)
def test_each_remedy_for_too_few_micro_batches_helps(config: Path, schedule, samples, micro_batch_size, dp, remedy):
    keys = {"train.global_batch_size": str(samples), "train.micro_batch_size": str(micro_batch_size)}

    def launch(**changed: str) -> None:
        values = keys | {f"train.{name}": value for name, value in changed.items()}
        launched(config, 2 * dp, ON_STAGES, *schedule, *(f"{key}={value}" for key, value in values.items()))

    with pytest.raises(ConfigError) as raised:
        launch()
    assert str(raised.value).endswith(f"; use train.global_batch_size = {remedy}")
    sizes, _, smaller = remedy.partition(", or train.micro_batch_size = ")
    for size in re.findall(r"\d+", sizes.partition(" or a larger")[0]):
        launch(global_batch_size=size)
    if smaller:
        launch(micro_batch_size=smaller)


def test_more_stages_than_sublayers_are_refused(config: Path):
    with pytest.raises(ConfigError, match=r"parallel\.pp = 5 stages are more than the 4 into which the model"):
        launched(config, 5, "parallel.pp=5", "train.global_batch_size=5")


@pytest.mark.parametrize(
    ("override", "reason"),
    [("train.recompute=true", "recomputation would run"), ("train.compile=true", "a compiled block has one backward")],
)
def test_schedule_that_splits_the_backward_is_refused_where_it_cannot(config: Path, override: str, reason: str):
    overrides = [ON_STAGES, 'parallel.pp_schedule="zero_bubble"', override]
    with pytest.raises(ConfigError, match=rf'parallel\.pp_schedule = "zero_bubble" computes .* but {reason}'):
        load_run_config(config, overrides)


def test_split_backward_is_refused_where_blocks_share_parameters(config: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("megalin.parallel.config.version", lambda name: "2.13.0+cpu")
    layers = "model.layers=[{sublayers=[{type='hgrn2', num_heads=4}], repeat=4}]"
    with pytest.raises(ConfigError, match=r'blocks of type "hgrn2" share parameters, whose gradients torch cannot'):
        launched(config, 2, ON_STAGES, 'parallel.pp_schedule="zero_bubble"', layers)


def test_split_backward_is_refused_by_a_torch_that_loses_gradients(config: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("megalin.parallel.config.version", lambda name: "2.12.1")
    with pytest.raises(ConfigError, match=r"torch 2\.12\.1 loses gradients of weights there \(2\.13 does not\); use"):
        load_run_config(config, [ON_STAGES, 'parallel.pp_schedule="zero_bubble"'])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"pp_schedule": "1f1b", "pp_stages_per_rank": 2},
            r'pp_stages_per_rank = 2 with pp_schedule = "1f1b", which runs one stage a rank',
        ),
        (
            {"pp_schedule": "interleaved"},
            r'pp_stages_per_rank = 1 with pp_schedule = "interleaved", which runs several stages',
        ),
    ],
)
def test_stages_that_are_not_the_schedule_s_are_refused(values: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        parse(ParallelConfig, {"pp": 2} | values, "test")


def test_ranks_that_the_stages_do_not_divide_are_refused():
    with pytest.raises(
        ConfigError, match=r"parallel\.pp times parallel\.tp = 6 does not divide the number of ranks, 8"
    ):
        check_world_size(ParallelConfig(pp=3, tp=2), 8)
    with pytest.raises(ConfigError, match=r"data axis of 2 ranks \(8 ranks / tp 2 / pp 2\)"):
        check_world_size(ParallelConfig(pp=2, tp=2, cp=4), 8)


def test_encoder_is_refused():
    with pytest.raises(ConfigError, match=r"an encoder cannot be partitioned into stages .* use parallel\.pp = 1"):
        check_model(load_preset("danet-small").model, ParallelConfig(pp=2), 64)
