"""Update hooks, shown by a moving average of the weights: its values, checkpoints, skipped updates and refusals."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import megalin.train.engine as engines
from megalin.checkpoint.index import DTYPES
from megalin.checkpoint.load import load
from megalin.checkpoint.manifest import Checkpoint, read_manifest, step_directory
from megalin.checkpoint.tensors import OPTIMIZER_PREFIX
from megalin.data.batch import AnyBatch, Batch
from megalin.errors import CheckpointError, NumericError
from megalin.generation import load_for_generation
from megalin.parallel.mesh import Mesh
from megalin.parallel.process_group import process_group
from megalin.parallel.tensor_parallel import full_tensor, local
from megalin.train.config import load_run_config
from megalin.train.deepspeed_engine import DeepSpeedEngine
from megalin.train.engine import Engine, FullyShardedEngine
from megalin.train.step import accumulate_gradients
from megalin.train.update_hooks import HOOKS_PREFIX, UpdateHook
from tests.model_runs import CPU, late_results, losses, train_here, write_config
from tests.numerics import assert_close
from tests.ranks import run_ranks

STEPS, STOP = 4, 2
DECAY = 0.75


class WeightAverage:
    """average <- average + (1 - DECAY) (weight - average) after each applied update, from the first weights."""

    name = "average"

    def memory_bytes(self, elements: int) -> int:
        return 2 * 4 * elements  # the averages, and the operands of one update

    def start(self, weights: Mapping[str, Tensor]) -> None:
        self._averages = {name: weight.detach().clone() for name, weight in weights.items()}

    def after_update(self, weights: Mapping[str, Tensor], *, applied: Tensor, step: int) -> None:
        for name, weight in weights.items():
            average = local(self._averages[name])
            average.lerp_(torch.where(applied, local(weight), average), 1 - DECAY)

    def tensors(self) -> Mapping[str, Tensor]:
        return self._averages


class Case(NamedTuple):
    """A mesh and an engine."""

    world_size: int
    overrides: tuple[str, ...] = ()


DEEPSPEED = "train.engine=deepspeed"
CASES = {
    "single": Case(1),
    "dp2": Case(2, ("train.micro_batch_size=1",)),
    "dp2_zero1_bf16": Case(2, ("parallel.zero=1", "train.dtype=bfloat16")),
    "pp2": Case(2, ("parallel.pp=2",)),
    "tp2_cp2": Case(4, ("parallel.tp=2", "parallel.cp=2")),
    "deepspeed": Case(1, (DEEPSPEED,)),
    "deepspeed_zero0": Case(2, (DEEPSPEED, "parallel.zero=0")),
    "deepspeed_zero2_bf16": Case(2, (DEEPSPEED, "parallel.zero=2", "train.dtype=bfloat16")),
    "deepspeed_zero3_tp2_cp2": Case(4, (DEEPSPEED, "parallel.zero=3", "parallel.tp=2", "parallel.cp=2")),
}

FAST = ("single", "deepspeed_zero2_bf16")
"""Cases without the slow tests; MOVES has other axes."""
EVERY_CASE = [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
IN_ONE_PROCESS = ("single", pytest.param("deepspeed", marks=pytest.mark.slow))
PLAIN = ("deepspeed_zero2_bf16", pytest.param("dp2", marks=pytest.mark.slow))
_MOVES = ("parallel.pp=2",), (DEEPSPEED, "parallel.zero=1"), ("parallel.tp=2",)
MOVES = {"single": (*_MOVES, ("train.micro_batch_size=1",)), "dp2": (*_MOVES, (DEEPSPEED, "parallel.tp=2"))}
"""Meshes of two ranks, with either engine, by the case in whose folder they lie."""


class Run(NamedTuple):
    """One call of the trainer."""

    folder: Path
    overrides: Sequence[str]
    hooked: bool = True
    late: bool = False


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tables = {"train": {"steps": STEPS}, "checkpoint": {"every_steps": 1}, "data": {"validation": []}}
    return write_config(tmp_path_factory.mktemp("hooks"), **tables)


def train_runs(config: Path, runs: Sequence[Run]) -> None:
    """Trains one run after the other; each starts from its folder, as a new process does."""
    for run in runs:
        hooks = [WeightAverage()] if run.hooked else []
        with late_results() if run.late else nullcontext():
            train_here(config, run.folder, *run.overrides, hooks=hooks)


@pytest.fixture(scope="module")
def folders(config: Path, tmp_path_factory: pytest.TempPathFactory, with_slow: bool) -> dict[str, Path]:
    """Folder of each case, with its runs:

    - `whole`, saved after each step; `late`, saved after the last one, with a step in flight;
    - `resumed`, which stopped after STOP steps and went on;
    - in one process, `dropped`, which went on without the hook, and `added`, which had it from then on;
    - `plain` without the hook, for the cases of PLAIN;
    - `moved`, for the cases of MOVES: each step on one of its meshes and engines.
    """
    cases = {name: case for name, case in CASES.items() if with_slow or name in FAST}
    made = {name: tmp_path_factory.mktemp(name) for name in cases}
    runs: dict[int, list[Run]] = {case.world_size: [] for case in cases.values()}
    for name, (world_size, overrides) in cases.items():
        folder, stop = made[name], [*overrides, f"train.stop_after_steps={STOP}"]
        runs[world_size] += [
            Run(folder / "whole", overrides),
            Run(folder / "late", [*overrides, "checkpoint.every_steps=100"], late=True),
            Run(folder / "resumed", stop),
            Run(folder / "resumed", overrides),
        ]
        if world_size == 1:
            runs[1] += [Run(folder / "dropped", stop), Run(folder / "dropped", overrides, hooked=False)]
            runs[1] += [Run(folder / "added", stop, hooked=False), Run(folder / "added", overrides)]
        if name in ("dp2", "deepspeed_zero2_bf16"):
            runs[world_size].append(Run(folder / "plain", overrides, hooked=False))
    for name in (name for name in MOVES if name in cases):
        for step, way in enumerate(MOVES[name], start=1):
            runs[2].append(Run(made[name] / "moved", [*way, f"train.stop_after_steps={step}"]))
    for world_size, of_world in runs.items():
        run_ranks(world_size, train_runs, config, of_world)
    return made


def checkpoint(folder: Path, step: int) -> Checkpoint:
    directory = folder / "checkpoints" / step_directory(step)
    return Checkpoint(directory, read_manifest(directory))


def saved(folder: Path, step: int) -> dict[str, Tensor]:
    """Every tensor of the checkpoint of `step`, unsharded."""
    found = checkpoint(folder, step)
    records = found.index().tensors
    tensors = {
        name: torch.full(record.shape, torch.nan, dtype=DTYPES[record.dtype]) for name, record in records.items()
    }
    load(found, tensors)
    return tensors


def averages(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The averages of a checkpoint by the names of their weights."""
    prefix = f"{HOOKS_PREFIX}{WeightAverage.name}."
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def weights(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights of a checkpoint."""
    return {name: tensor for name, tensor in tensors.items() if not name.startswith(OPTIMIZER_PREFIX)}


def average_of(start: Mapping[str, Tensor], later: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The average of weights from their values at its start and after each step."""
    found = {name: weight.clone() for name, weight in start.items()}
    for values in later:
        for name, average in found.items():
            average.lerp_(values[name], 1 - DECAY)
    return found


def assert_equal(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(actual[name], expected[name])] == []


def _initial_weights(config: Path) -> dict[str, Any]:
    run = load_run_config(config, [])
    tensors = FullyShardedEngine(run, Mesh(run.parallel, CPU)).tensors()
    return {name: full_tensor(tensor.detach()).numpy() for name, tensor in weights(tensors).items()}


@pytest.fixture(scope="module")
def initial(config: Path) -> dict[str, Tensor]:
    """The weights before the first step, on every mesh."""
    return {name: torch.from_numpy(array) for name, array in run_ranks(1, _initial_weights, config)[0].items()}


@pytest.mark.parametrize("case", EVERY_CASE)
def test_the_average_is_that_of_the_weights_after_each_step(folders, initial, case):
    later = []
    for step in range(1, STEPS + 1):
        tensors = saved(folders[case] / "whole", step)
        later.append(weights(tensors))
        assert_equal(averages(tensors), average_of(initial, later))
    assert not torch.equal(later[0]["embedding.weight"], later[1]["embedding.weight"])


@pytest.mark.parametrize("case", EVERY_CASE)
def test_steps_in_flight_and_a_resumed_run_change_no_bit_of_it(folders, case):
    expected = saved(folders[case] / "whole", STEPS)
    assert_equal(saved(folders[case] / "late", STEPS), expected)
    assert_equal(saved(folders[case] / "resumed", STEPS), expected)


@pytest.mark.parametrize("case", PLAIN)
def test_a_hook_changes_no_bit_of_the_training(folders, case):
    plain, whole = folders[case] / "plain", folders[case] / "whole"
    assert losses(plain) == losses(whole)
    tensors = saved(whole, STEPS)
    assert_equal(saved(plain, STEPS), {name: tensors[name] for name in tensors if HOOKS_PREFIX not in name})


@pytest.mark.parametrize("case", ["single", pytest.param("dp2", marks=pytest.mark.slow)])
def test_another_mesh_and_the_other_engine_go_on_with_it(folders, case):
    step = len(MOVES[case])
    assert_close(saved(folders[case] / "moved", step), saved(folders["single"] / "whole", step), 2e-5)


def warnings_of(folder: Path) -> list[str]:
    lines = [json.loads(line) for line in (folder / "incidents.jsonl").read_text().splitlines()]
    return [line["message"] for line in lines if line["kind"] == "warning"]


@pytest.mark.parametrize("case", IN_ONE_PROCESS)
def test_a_run_goes_on_without_the_hook(folders, case):
    (message,) = warnings_of(folders[case] / "dropped")
    assert "has the state of the update hook average, which this run does not have; it is not loaded" in message
    tensors = saved(folders[case] / "dropped", STEPS)
    assert averages(tensors) == {}
    assert_equal(weights(tensors), weights(saved(folders[case] / "whole", STEPS)))


@pytest.mark.parametrize("case", IN_ONE_PROCESS)
def test_a_hook_without_a_saved_state_starts_from_the_loaded_weights(folders, case):
    (message,) = warnings_of(folders[case] / "added")
    assert "lacks the state of the update hook average, which starts from the weights of this checkpoint" in message
    start, *later = [weights(saved(folders[case] / "added", step)) for step in range(STOP, STEPS + 1)]
    assert_equal(averages(saved(folders[case] / "added", STEPS)), average_of(start, later))


class LargerAverage(WeightAverage):
    """The same hook in a later version, with one more tensor."""

    def tensors(self) -> Mapping[str, Tensor]:
        return {**super().tensors(), "count": torch.zeros(())}


def test_a_hook_whose_state_is_saved_in_part_is_refused(config, folders):
    folder = folders["single"] / "resumed"
    refused = pytest.raises(CheckpointError, match=r"model:\n  optim.hooks.average.count: missing from the checkpoint")
    with process_group(CPU), refused:
        train_here(config, folder, hooks=[LargerAverage()])


class EagerGraph:
    """Stand-in for the CUDA graph of a step on a CPU: the same interface, run eagerly."""

    is_captured = False

    def __init__(
        self, model: Any, mesh: Mesh, loss_scale: Tensor | None, *, automatic: bool, reads_documents: bool
    ) -> None:
        assert not automatic
        assert not reads_documents
        self._model, self._mesh, self._loss_scale = model, mesh, loss_scale

    def accumulate_gradients(self, batches: Sequence[AnyBatch]) -> tuple[Tensor, Tensor]:
        return accumulate_gradients(self._model, batches, self._mesh, self._loss_scale)

    def report_lines(self) -> list[str]:
        return []

    def before_evaluation(self) -> None:
        pass

    def close(self) -> None:
        pass


def test_steps_of_a_cuda_graph_call_the_hook(config, folders, tmp_path, monkeypatch):
    monkeypatch.setattr(engines, "GradientGraph", EagerGraph)
    with process_group(CPU):
        train_runs(config, [Run(tmp_path, ["train.cuda_graphs=true"])])
    assert_equal(saved(tmp_path, STEPS), saved(folders["single"] / "whole", STEPS))


def test_readers_of_weights_ignore_the_state_of_hooks(folders):
    tensors = saved(folders["single"] / "whole", STEPS)
    model, _ = load_for_generation(folders["single"] / "whole", CPU)
    assert_equal({name: weight.detach() for name, weight in model.named_parameters()}, weights(tensors))


def make_engine(config: Path, hook: UpdateHook, *overrides: str) -> Engine:
    run = load_run_config(config, list(overrides))
    engine = DeepSpeedEngine if DEEPSPEED in overrides else FullyShardedEngine
    return engine(run, Mesh(run.parallel, CPU), [hook])


def make_batch() -> Batch:
    generator = torch.Generator().manual_seed(torch.distributed.get_rank())
    ids = torch.randint(0, 257, (2, 37), generator=generator)
    return Batch(ids[:, :-1].contiguous(), ids[:, 1:].clone(), torch.zeros(2, 36, dtype=torch.int32), torch.arange(2))


def _skip_updates(config: Path, overrides: Sequence[str]) -> None:
    """Takes a step; then one that is not finite and, if the engine does not wait, another one before its error."""
    hook = WeightAverage()
    engine = make_engine(config, hook, *overrides)

    def step(number: int) -> Any:
        return engine.step([make_batch()], learning_rate=0.1, step=number)

    def state() -> list[Tensor]:
        return [local(tensor).clone() for tensor in hook.tensors().values()]

    first = state()
    step(1).wait()
    before = state()
    assert not all(map(torch.equal, before, first))
    sums = engine.model.loss_sums
    poisoned = patch.object(engine.model, "loss_sums", lambda inputs: sums(inputs) * float("nan"))
    if DEEPSPEED in overrides:
        with poisoned, pytest.raises(NumericError):
            step(2)
    else:
        with poisoned:
            bad = step(2)
        step(3)
        with pytest.raises(NumericError):
            bad.wait()
    assert all(map(torch.equal, state(), before))
    if DEEPSPEED not in overrides:
        step(4).wait()
        assert not all(map(torch.equal, state(), before))


def _skip_updates_of_engines(config: Path) -> None:
    for overrides in ((), (DEEPSPEED, "parallel.zero=0"), (DEEPSPEED, "parallel.zero=2")):
        _skip_updates(config, overrides)


def test_a_skipped_update_leaves_the_state_of_a_hook_unchanged(config):
    run_ranks(2, _skip_updates_of_engines, config)


class _NoReads(TorchDispatchMode):
    """Refuses ops whose result the host reads."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is not torch.ops.aten._local_scalar_dense.default, "the host reads a tensor"
        return func(*args, **kwargs or {})


def _launch_without_reads(config: Path) -> None:
    engine = make_engine(config, WeightAverage())
    batch = make_batch()
    engine.step([batch], learning_rate=0.1, step=1).wait()
    with _NoReads():
        pending = engine.step([batch], learning_rate=0.1, step=2)
        with pytest.raises(AssertionError, match="the host reads a tensor"):
            pending.applied.item()


def test_the_launch_of_a_step_with_a_hook_reads_nothing_from_the_device(config):
    with process_group(CPU):
        _launch_without_reads(config)


@pytest.mark.parametrize(("name", "problem"), [("average", "have the same name"), ("a.b", "contains a dot")])
def test_names_of_hooks_that_checkpoints_could_not_tell_apart_are_refused(config, name, problem):
    hooks = [WeightAverage(), WeightAverage()]
    hooks[1].name = name
    run = load_run_config(config, [])
    with process_group(CPU), pytest.raises(AssertionError, match=problem):
        FullyShardedEngine(run, Mesh(run.parallel, CPU), hooks)
