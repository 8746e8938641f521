"""DeepSpeed as the engine: losses, norms, weights and moments of FSDP2, and checkpoints that either engine resumes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megalin.checkpoint.load import load, newest
from megalin.checkpoint.save import save
from megalin.checkpoint.tensors import OPTIMIZER_PREFIX
from megalin.data.batch import Batch
from megalin.errors import ConfigError, NumericError
from megalin.model.encoder import POSITION_TABLE
from megalin.parallel.mesh import Mesh
from megalin.parallel.tensor_parallel import full_tensor, local
from megalin.train.config import load_run_config
from megalin.train.deepspeed_engine import DeepSpeedEngine
from megalin.train.engine import FullyShardedEngine
from megalin.train.loss_scale import LOSS_SCALE_PREFIX
from tests.model_runs import CPU, DROPOUT, checkpoint_tensors, losses, metrics, train_here, write_config
from tests.numerics import assert_close
from tests.ranks import run_ranks
from tests.train.test_encoder_run import write_config as write_encoder_config
from tests.train.test_initial_weights import STILL, weights_of_step
from tests.train.test_resume import assert_same_end

STEPS = 3
ENGINE = "train.engine=deepspeed"


class Case(NamedTuple):
    """A run: the mesh and steps of both engines, and the ZeRO settings of DeepSpeed."""

    world_size: int
    overrides: tuple[str, ...]
    zero: int | Mapping[str, Any]
    """A stage, or the content of a JSON file."""


BF16 = "train.dtype=bfloat16"
FP16 = ("train.dtype=float16", "train.loss_scale.initial=524288.0")
"""With a scale at which one of the first gradients overflows."""
MILD = "optimizer.lr=0.001"
"""With ten times this rate, differences in bf16 rounding grow until gradient norms differ by 0.2 %."""
ACCUMULATING = "train.micro_batch_size=1"
CASES = {
    "zero0": Case(2, (), 0),
    "zero1": Case(2, (), 1),
    "zero2": Case(2, (), 2),
    "zero3": Case(2, (), 3),
    "zero3_accumulating": Case(2, (ACCUMULATING, "train.recompute=true"), 3),
    "zero2_offloaded": Case(
        2, (), {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}, "train_batch_size": "auto"}
    ),
    "zero3_offloaded": Case(
        2,
        (),
        {
            "zero_optimization": {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
            "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "betas": "auto"}},
        },
    ),
    "zero0_tp2": Case(4, ("parallel.tp=2",), 0),
    "zero1_tp2": Case(4, ("parallel.tp=2",), 1),
    "zero3_tp2": Case(4, ("parallel.tp=2",), 3),
    "zero2_tp2_cp2": Case(4, ("parallel.tp=2", "parallel.cp=2", "parallel.sequence_parallel=true"), 2),
    # Weights that three ranks do not divide evenly.
    "zero3_cp3": Case(3, ("parallel.cp=3",), 3),
    "zero1_bf16": Case(2, (BF16, MILD, ACCUMULATING), 1),
    "zero3_bf16": Case(2, (BF16, MILD, ACCUMULATING), 3),
    "zero1_fp16": Case(2, (*FP16, MILD, ACCUMULATING), 1),
    "zero3_fp16": Case(2, (*FP16, MILD), 3),
    "zero2_tp2_fp16": Case(4, (*FP16, MILD, "parallel.tp=2"), 2),
    "zero2_tp2_bf16": Case(4, (BF16, MILD, "parallel.tp=2"), 2),
}
PAUSED = ("zero0", "zero1_bf16", "zero1_fp16", "zero3_tp2", "zero3_cp3")
"""Cases that also run with a stop and a resumption in the middle."""
FAST = ("zero0", "zero1_fp16", "zero3_cp3")
"""Cases of `make test`: uneven shards, context parallelism, and fp16. test_update_hooks.py has stage 2 and bf16, and a
test below has tensor parallelism."""
FAST_PAUSED = ("zero1_fp16",)
"""In make test the other engine goes on from a checkpoint of stage 3."""


def marked(names: Iterable[str], fast: Sequence[str] = FAST) -> list[Any]:
    return [pytest.param(name, marks=() if name in fast else pytest.mark.slow) for name in names]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tables = {"model": DROPOUT, "train": {"steps": STEPS}, "checkpoint": {"every_steps": 100}}
    return write_config(tmp_path_factory.mktemp("deepspeed"), **tables)


def _nothing_is_compiled() -> None:
    """Makes a compilation of DeepSpeed's kernels an error."""
    from deepspeed.ops.op_builder.builder import OpBuilder

    def refuse(self: OpBuilder, verbose: bool = True) -> None:
        raise AssertionError(f"{self.name} is compiled")

    OpBuilder.jit_load = refuse


def _runs(config: Path, calls: list[tuple[Path, list[str]]]) -> None:
    """Trains several runs one after the other; each starts from its folder only."""
    _nothing_is_compiled()
    for folder, overrides in calls:
        train_here(config, folder, *overrides)


def engine_overrides(zero: int | Mapping[str, Any], folder: Path) -> list[str]:
    """Overrides that select DeepSpeed with these ZeRO settings."""
    if isinstance(zero, int):
        return [ENGINE, f"parallel.zero={zero}"]
    path = folder / "ds.json"
    path.write_text(json.dumps(zero))
    return [ENGINE, f"train.deepspeed_config={path}"]


class Folders(NamedTuple):
    """Run folders of a case."""

    deepspeed: Path
    fsdp2: Path
    paused: Path


@pytest.fixture(scope="module")
def folders(with_slow: bool, config: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Folders]:
    """Run folders of each selected case; cases that differ in ZeRO only share the run of FSDP2."""
    made: dict[str, Folders] = {}
    calls: dict[int, dict[Path, list[list[str]]]] = {2: {}, 3: {}, 4: {}}
    root = tmp_path_factory.mktemp("runs")
    for name, case in CASES.items():
        if not with_slow and name not in FAST:
            continue
        folder, shared = root / name, root / f"fsdp2 {case.world_size} {' '.join(case.overrides)}"
        folder.mkdir()
        made[name] = Folders(folder / "deepspeed", shared, folder / "paused")
        overrides, of_world = [*engine_overrides(case.zero, folder), *case.overrides], calls[case.world_size]
        of_world |= {made[name].deepspeed: [overrides], shared: [list(case.overrides)]}
        if name in (PAUSED if with_slow else FAST_PAUSED):
            of_world[made[name].paused] = [[*overrides, "train.stop_after_steps=2"], overrides]
    for world_size, runs in calls.items():
        if runs:
            run_ranks(world_size, _runs, config, [(folder, item) for folder, items in runs.items() for item in items])
    return made


def finite_metrics(folder: Path) -> list[dict[str, Any]]:
    return [{name: value for name, value in line.items() if value is not None} for line in metrics(folder)]


@pytest.mark.parametrize("name", marked(CASES))
def test_both_engines_take_the_same_steps(folders, name):
    actual, expected = finite_metrics(folders[name].deepspeed), finite_metrics(folders[name].fsdp2)
    assert min(line.get("grad_norm", 2.0) for line in expected) > 1.0  # the limit of clipping
    assert any(line.get("skipped") for line in expected) == ("fp16" in name)
    low = "bf16" in name or "fp16" in name
    assert len(actual) == len(expected) == STEPS
    for line, other in zip(actual, expected, strict=True):
        assert line == pytest.approx(other, rel=2e-3 if low else 2e-6)
    if not low:
        assert_close(checkpoint_tensors(folders[name].deepspeed), checkpoint_tensors(folders[name].fsdp2), 2e-5)


@pytest.mark.parametrize("name", marked(PAUSED, FAST_PAUSED))
def test_a_run_that_paused_ends_with_the_same_bits(folders, name):
    assert_same_end(folders[name].paused, folders[name].deepspeed)


def test_the_run_folder_keeps_what_the_engine_got(folders):
    settings = json.loads((folders["zero3_cp3"].deepspeed / "deepspeed.json").read_text())
    assert settings["zero_optimization"]["stage"] == 3
    # With context parallelism, ranks that share a sample count too.
    assert (settings["train_batch_size"], settings["gradient_accumulation_steps"]) == (12, 2)


def test_either_engine_goes_on_from_the_other_on_another_mesh(config, folders, tmp_path):
    folder = tmp_path / "run"
    ways = [[ENGINE, "parallel.zero=3"], ["parallel.tp=2"], [ENGINE, "parallel.tp=2", "parallel.zero=1"]]
    stops = [[*way, f"train.stop_after_steps={step}"] for step, way in enumerate(ways, start=1)]
    run_ranks(2, _runs, config, [(folder, overrides) for overrides in stops])
    expected = folders["zero0"].fsdp2
    assert losses(folder) == pytest.approx(losses(expected), rel=2e-6)
    assert_close(checkpoint_tensors(folder), checkpoint_tensors(expected), 2e-5)


def _compiled(config: Path, calls: list[tuple[Path, list[str]]]) -> int:
    """Trains with compiled blocks, traced but not compiled by inductor; returns the number of graphs."""
    torch.compile = partial(torch.compile, backend="aot_eager")
    _runs(config, [(folder, [*overrides, "train.compile=true", "data.validation=[]"]) for folder, overrides in calls])
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("stage", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_compiled_blocks_take_the_same_steps(config, folders, tmp_path, stage):
    """Stage 3 gathers all weights for each use; by default small ones stay gathered."""
    gathered = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}
    overrides = engine_overrides(gathered, tmp_path) if stage == 3 else [ENGINE, "parallel.tp=2", "parallel.zero=1"]
    kinds_of_blocks, world_size = 2, 1 if stage == 3 else 2
    found = run_ranks(world_size, _compiled, config, [(tmp_path / "run", overrides)])
    assert found == [kinds_of_blocks] * world_size
    expected = folders["zero0"].fsdp2
    assert losses(tmp_path / "run") == pytest.approx(losses(expected), rel=2e-6)
    assert_close(checkpoint_tensors(tmp_path / "run"), checkpoint_tensors(expected), 2e-5)


def _encoders(config: Path, folder: Path) -> list[str]:
    """Trains an encoder with each engine; returns DeepSpeed's errors where its weights are sharded."""
    train_here(config, folder / "fsdp2", "train.steps=3")
    train_here(config, folder / "deepspeed", "train.steps=3", ENGINE, "parallel.zero=2")
    messages = []
    for sharding in ("parallel.tp=2", "parallel.zero=3"):
        with pytest.raises(ConfigError) as raised:
            train_here(config, folder / "refused", "parallel.zero=2", sharding, ENGINE)
        messages.append(str(raised.value))
    return messages


def test_a_mixer_that_reads_its_whole_weights_trains_where_they_are_whole(tmp_path):
    for messages in run_ranks(2, _encoders, write_encoder_config(tmp_path), tmp_path):
        assert "parallel.tp = 2 and ZeRO stage 2: after each step a mixer of this model reads whole" in messages[0]
        assert "parallel.tp = 1 and ZeRO stage 3: after each step" in messages[1]
    for line, other in zip(metrics(tmp_path / "deepspeed"), metrics(tmp_path / "fsdp2"), strict=True):
        assert line == pytest.approx(other, rel=2e-6)


def test_weights_of_another_run_are_the_first_ones(config, folders, tmp_path):
    """The run has taken its only step when it is saved, at a rate that changes nothing."""
    source = folders["zero0"].fsdp2
    overrides = [ENGINE, "parallel.zero=3", f"train.initial_weights={source}", *STILL]
    run_ranks(2, _runs, config, [(tmp_path / "run", overrides)])
    tensors, expected = checkpoint_tensors(tmp_path / "run"), weights_of_step(source, STEPS)
    assert [name for name in expected if not torch.equal(tensors[name], expected[name])] == []
    assert {int(tensor) for name, tensor in tensors.items() if name.endswith(".step")} == {1}


def test_a_longer_table_of_positions_is_tiled(tmp_path):
    """31 rows from 24, which two ranks share unevenly."""
    config, source, longer = write_encoder_config(tmp_path), tmp_path / "source", tmp_path / "longer"
    start = [ENGINE, "parallel.zero=2", "model.max_positions=31", f"train.initial_weights={source}", *STILL]
    run_ranks(2, _runs, config, [(source, ["train.steps=1"]), (longer, start)])
    ended, started = weights_of_step(source, 1), weights_of_step(longer, 1)
    expected = ended | {POSITION_TABLE: torch.cat([ended[POSITION_TABLE]] * 2)[:31]}
    assert [name for name in expected if not torch.equal(started[name], expected[name])] == []


def _engine(config: Path, *overrides: str) -> DeepSpeedEngine:
    run = load_run_config(config, [ENGINE, *overrides])
    return DeepSpeedEngine(run, Mesh(run.parallel, CPU))


LOWEST = ("train.dtype=float16", "train.loss_scale.initial=64.0", "train.loss_scale.minimum=64.0")
STAGES = (["zero=0"], ["zero=1"], ["zero=3"], ["zero=1", BF16], ["zero=2", *LOWEST])
POISONS = {"loss": r"loss nan, gradient norm", "gradient": r"loss \d\S*, gradient norm (nan|inf) is not finite"}


def _poisoned(config: Path) -> list[tuple[str, str]]:
    """Errors of a second step whose loss or gradient is not finite on one rank, by stage; no weight may change."""
    _nothing_is_compiled()
    tokens = torch.arange(24).view(2, 12) + dist.get_rank()
    documents, numbers = torch.zeros_like(tokens, dtype=torch.int32), torch.arange(2)
    batch = Batch(tokens, tokens + 1, documents, numbers, numbers)
    messages = []
    for zero, *others in STAGES:
        engine = _engine(config, f"parallel.{zero}", *others)
        engine.step([batch], learning_rate=1e-2, step=1)
        before = {name: local(tensor).clone() for name, tensor in engine.tensors().items()}
        for poison in POISONS:
            poisoned = _poisoned_losses(engine, poison) if dist.get_rank() == 1 else nullcontext()
            with poisoned, pytest.raises(NumericError) as raised:
                engine.step([batch], learning_rate=1e-2, step=2)
            messages.append((poison, str(raised.value)))
            after = engine.tensors()
            changed = [name for name in after if not torch.equal(local(after[name]), before[name])]
            assert all(name.startswith(LOSS_SCALE_PREFIX) for name in changed), changed
    return messages


def _poisoned_losses(engine: DeepSpeedEngine, poison: str) -> AbstractContextManager[Any]:
    sums = engine.model.loss_sums

    def poisoned(inputs: Mapping[str, Tensor]) -> Tensor:
        losses = sums(inputs)
        if poison == "loss":
            return losses * float("nan")
        losses.register_hook(lambda gradient: gradient * float("inf"))
        return losses

    return patch.object(engine.model, "loss_sums", poisoned)


def test_no_rank_takes_a_step_that_is_not_finite(config):
    for messages in run_ranks(2, _poisoned, config):
        assert len(messages) == len(STAGES) * len(POISONS)
        poison, lowest = messages.pop()
        assert poison == "gradient"
        assert re.match(
            r"step 2: the gradient overflows float16 with the loss scale 64, .*\(1 overflows in this", lowest
        )
        assert 'train.engine = "fsdp2" names the parameters' in lowest
        for poison, message in messages:
            assert re.match(rf"step 2: {POISONS[poison]}", message)
            assert "No weight was changed and nothing was saved" in message


def _refused(config: Path, override: str) -> str:
    with pytest.raises(ConfigError) as raised:
        _engine(config, override)
    return str(raised.value)


def test_settings_that_deepspeed_refuses_are_an_error_of_the_user(config, tmp_path):
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"communication_data_type": "fp8"}))
    (message,) = run_ranks(1, _refused, config, f"train.deepspeed_config={file}")
    assert "rejects the settings of train.deepspeed_config: Invalid communication_data_type" in message


def _initial(config: Path, root: Path) -> None:
    """Checks, in bfloat16, stored weights and compute dtypes before the first step, and after loading other weights."""
    from deepspeed import zero as engine_zero

    run = load_run_config(config, [BF16])
    truth = FullyShardedEngine(run, Mesh(run.parallel, CPU)).tensors()
    names = [name for name in truth if not name.startswith(OPTIMIZER_PREFIX)]
    save(root, step=0, tensors={name: -truth[name].detach() for name in names}, state={})
    imported = newest(root)
    assert imported is not None
    for zero in (1, 2, 3):
        engine = _engine(config, BF16, f"parallel.zero={zero}")
        tensors = engine.tensors()
        assert tensors.keys() == truth.keys()
        assert all(torch.equal(full_tensor(tensors[name]), full_tensor(truth[name])) for name in truth)
        assert {parameter.dtype for parameter in engine.model.parameters()} == {torch.bfloat16}
        (frequencies,) = engine.model.full_precision_modules()
        with engine_zero.GatheredParameters(list(frequencies.parameters())):
            assert {output.dtype for output in frequencies()} == {torch.float32}
        engine.set_weights(lambda weights: (load(imported, weights), weights)[1])
        loaded = engine.tensors()
        assert all(torch.equal(full_tensor(loaded[name]), -full_tensor(truth[name])) for name in names)


def test_bf16_keeps_the_unrounded_weights_and_computes_exponentials_in_fp32(config, tmp_path):
    run_ranks(1, _initial, config, tmp_path)
