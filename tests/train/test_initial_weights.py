"""Runs that start from another run's weights: equal on every mesh, the report, resumption, refusals, growing length."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megalin.checkpoint.index import DTYPES
from megalin.checkpoint.load import load, of_step
from megalin.checkpoint.save import save
from megalin.checkpoint.tensors import OPTIMIZER_PREFIX
from megalin.errors import MegalinError
from megalin.model.encoder import POSITION_TABLE
from megalin.train.config import load_run_config
from megalin.train.initial_weights import InitialWeights
from tests.encoder_cases import CASES
from tests.model_runs import checkpoint_tensors, ledger, metrics, model_table, train_here, write_config
from tests.ranks import run_ranks
from tests.train.test_encoder_run import lines
from tests.train.test_encoder_run import write_config as write_encoder_config
from tests.train.test_resume import assert_same_end

STILL = ("train.steps=1", "schedule.warmup_steps=0", "optimizer.lr=1e-30")
"""One step that changes no weight by more than 1e-30: its evaluation is that of the initial weights."""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A config, and the folder of its run of 4 steps with evaluations and checkpoints after 2 and 4."""
    folder = tmp_path_factory.mktemp("source")
    tables = {"train": {"steps": 4, "evaluate_every_steps": 2}, "schedule": {"warmup_steps": 1}}
    config = write_config(folder, **tables, checkpoint={"every_steps": 2})
    run_ranks(1, train_here, config, folder / "run")
    return config, folder / "run"


def weights_of_step(folder: Path, step: int) -> dict[str, Tensor]:
    checkpoint = of_step(folder / "checkpoints", step)
    records = checkpoint.index().tensors
    tensors = {
        name: torch.zeros(record.shape, dtype=DTYPES[record.dtype])
        for name, record in records.items()
        if not name.startswith(OPTIMIZER_PREFIX)
    }
    load(checkpoint, tensors, ignore=(OPTIMIZER_PREFIX,))
    return tensors


def report(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "initial_weights.json").read_text())


def _runs(config: Path, calls: dict[Path, list[str]]) -> list[str]:
    """Trains several runs one after the other; returns the errors of those that fail."""
    messages = []
    for folder, overrides in calls.items():
        try:
            train_here(config, folder, *overrides)
        except MegalinError as error:
            messages.append(f"{type(error).__name__}: {error}")
    return messages


@pytest.mark.parametrize(
    ("world_size", "meshes"),
    [
        (2, {"dp2": [], "pp2": ["parallel.pp=2"]}),
        pytest.param(6, {"tp2_cp3": ["parallel.tp=2", "parallel.cp=3"]}, marks=pytest.mark.slow),
    ],
    ids=["dp2_pp2", "tp2_cp3"],
)
def test_every_mesh_starts_from_the_same_weights(source, tmp_path, world_size, meshes):
    config, run = source
    start = [f"train.initial_weights={run}@2", *STILL]
    calls = {tmp_path / name: [*start, *overrides] for name, overrides in meshes.items()}
    assert run_ranks(world_size, _runs, config, calls)[0] == []
    expected = weights_of_step(run, 2)
    for folder in calls:
        tensors = checkpoint_tensors(folder)
        assert [name for name in expected if not torch.equal(tensors[name], expected[name])] == []
        assert {int(tensor) for name, tensor in tensors.items() if name.endswith(".step")} == {1}
        assert report(folder)["taken"] == sorted(expected)
        evaluation, wanted = metrics(folder)[-1]["evaluation_loss"], metrics(run)[1]["evaluation_loss"]
        assert evaluation == pytest.approx(wanted, rel=1e-6)


def test_resumption_does_not_read_the_initial_weights_again(source, tmp_path):
    config, run = source
    start = f"train.initial_weights={run}"
    moved, whole, parts = run.with_name("moved"), tmp_path / "whole", tmp_path / "parts"
    run_ranks(1, _runs, config, {whole: [start], parts: [start, "train.stop_after_steps=2"]})
    run.rename(moved)
    try:
        assert run_ranks(1, _runs, config, {parts: [start]}) == [[]]
    finally:
        moved.rename(run)
    assert_same_end(parts, whole)
    assert ledger(whole) == ledger(run)  # the samples start at the first
    assert report(whole)["step"] == 4
    assert metrics(whole)[0]["loss"] < metrics(run)[0]["loss"] - 0.5


def test_report_lists_tensors_taken_new_and_left(source, tmp_path) -> None:
    """A third block is new, and the second one has another mixer."""
    run = source[1]
    first, second = model_table()["layers"]
    other = {"sublayers": [{"type": "hgrn2", "num_heads": 4, "chunk_size": 16}, second["sublayers"][1]]}
    layers = {"layers": [first, other, first]}
    changed = write_config(tmp_path, model=layers, train={"steps": 4}, schedule={"warmup_steps": 1})
    calls = {tmp_path / "plain": [*STILL], tmp_path / "run": [f"train.initial_weights={run}@4", *STILL]}
    assert run_ranks(1, _runs, changed, calls) == [[]]
    actual, plain, saved = (
        weights_of_step(tmp_path / "run", 1),
        weights_of_step(tmp_path / "plain", 1),
        weights_of_step(run, 4),
    )
    found = report(tmp_path / "run")
    common = [name for name in actual if name in saved and saved[name].shape == actual[name].shape]
    assert (found["taken"], found["tiled"]) == (sorted(common), [])
    assert found["new"] == sorted(actual.keys() - saved)
    assert found["left"] == sorted(saved.keys() - actual)
    assert all(name.startswith(("blocks.1.", "blocks.2.", "shared.")) for name in found["new"])
    assert all(torch.equal(actual[name], saved[name]) for name in found["taken"])
    assert all(torch.equal(actual[name], plain[name]) for name in found["new"])
    assert "model.blocks.1.0.type: 'tnl' in the checkpoint, 'hgrn2' in the config" in found["model_differences"]
    lines = InitialWeights(**found).report_lines()
    counts = f"{len(common)} tensors taken, 0 tiled, {len(found['new'])} new, {len(found['left'])} left"
    assert lines[0].endswith(f"checkpoints/step-00000004: {counts}; the optimizer state is new")
    assert f"initial weights: {found['left'][0]} is left in the checkpoint: not in the model" in lines
    assert lines[-1] == f"initial weights: ... and {len(found['model_differences']) - 8} more"


REFUSED = {
    "width": (
        ["train.initial_weights={run}", "model.hidden_size=16"],
        r"CheckpointError: train.initial_weights: 12 tensors of \S+/step-00000004 have another shape in this model, "
        r"and weights are taken as they are:\n(.*\n){3}  blocks.0.sublayers.1.mixer.down.weight: shape \[32, 48\] in "
        r"the checkpoint, \[16, 48\] in the model\n(.*\n){4}  ... and 4 more\nuse the checkpoint's values of these "
        r"fields, or start without initial_weights:\n  model.hidden_size: 32 in the checkpoint, 16 in the config",
    ),
    "vocabulary": (
        ["train.initial_weights={run}", "model.vocab_size=258"],  # as many rows of the padded table
        r"CheckpointError: train.initial_weights = '\S+': model.vocab_size = 257 in \S+, 258 in the config: the same "
        "id is another token; use the tokenizer and vocabulary size of that run",
    ),
    "step": (["train.initial_weights={run}@3"], r"no checkpoint of step 3; nearest are 2 and 4"),
    "nothing_in_common": (
        ["train.initial_weights={other}"],
        r"other/checkpoints/step-00000000 has no tensor of this model; give a run of a similar model",
    ),
    "kind": (["train.initial_weights={encoder}"], r'model.kind = "encoder" in \S+, "decoder" in the config'),
    "no_folder": (["train.initial_weights={run}@last"], r"@last': no such folder; give a run folder, or RUN@STEP"),
    "hugging_face": (
        ["train.initial_weights={hf}"],
        r"hf': a Hugging Face folder; make a run folder of it with `megalin import hf \S+/hf RUN`, and give RUN",
    ),
    "no_run": (["train.initial_weights={empty}"], r"empty': not a run folder: it has no checkpoints/"),
    "no_checkpoint": (["train.initial_weights={fresh}"], r"fresh': the run has no checkpoint yet; train it first"),
}


def _sources(config: Path, folders: dict[str, Path]) -> None:
    """Makes folders that no run of `config` can start from."""
    model = load_run_config(config, []).model
    for name, saved in (("other", model), ("encoder", CASES[0].model)):
        state = {"config": {"model": saved.model_dump(mode="json")}}
        save(folders[name] / "checkpoints", step=0, tensors={"something": torch.zeros(1)}, state=state)
    for name in ("hf", "empty"):
        folders[name].mkdir()
    (folders["hf"] / "config.json").write_text("{}")
    (folders["fresh"] / "checkpoints").mkdir(parents=True)


@pytest.fixture(scope="module")
def refusals(source, tmp_path_factory) -> dict[str, str]:
    """The error of each case of REFUSED."""
    config, run = source
    root = tmp_path_factory.mktemp("refused")
    folders = {name: root / name for name in ("other", "encoder", "hf", "empty", "fresh")}
    _sources(config, folders)
    calls = {
        root / f"run_{name}": [override.format(run=run, **folders) for override in overrides]
        for name, (overrides, _) in REFUSED.items()
    }
    (messages,) = run_ranks(1, _runs, config, calls)
    assert [path for path in calls if path.exists()] == []
    return dict(zip(REFUSED, messages, strict=True))


@pytest.mark.parametrize("name", REFUSED)
def test_weights_that_do_not_fit_are_refused(refusals, name):
    assert re.search(REFUSED[name][1], refusals[name])


def test_a_run_whose_initial_weights_changed_is_refused(source, tmp_path):
    config, run = source
    first = [f"train.initial_weights={run}@2", "train.stop_after_steps=1"]
    folders = {"started": tmp_path / "started", "random": tmp_path / "random"}
    calls = [(folders["started"], first), (folders["random"], ["train.stop_after_steps=1"])]
    calls += [(folders["started"], overrides) for overrides in ([f"train.initial_weights={run}@4"], [])]
    calls += [(folders["random"], first)]
    (messages,) = run_ranks(1, _one_by_one, config, calls)
    other, left_out, added = messages
    assert re.search(
        r"step-00000001 was made with other .*\n  train.initial_weights: \S+@2 in the .*, \S+@4 now", other
    )
    assert re.search(r"train.initial_weights: \S+@2 in the checkpoint, not set now", left_out)
    assert re.search(r"train.initial_weights: not set in the checkpoint, \S+@2 now", added)


def _one_by_one(config: Path, calls: list[tuple[Path, list[str]]]) -> list[str]:
    return [message for folder, overrides in calls for message in _runs(config, {folder: overrides})]


LENGTHS = (12, 24, 48, 96)
"""As the four stages of DANet's pretraining: 128, 512, 1024 and 16384 tokens."""
STAGE_STEPS = 3
EVALUATED = ("evaluation_loss", "evaluation_mlm_loss", "evaluation_nsp_loss", "evaluation_mlm_accuracy")


def stage_overrides(length: int, *, positions: int | None = None, source: Path | None = None) -> list[str]:
    overrides = [f"data.sequence_length={length}", f"model.max_positions={positions or length}"]
    return [*overrides, *([] if source is None else [f"train.initial_weights={source}"])]


def _stages(config: Path, root: Path) -> None:
    """Trains the stages one after the other. Before each but the first it also trains `before-LENGTH`, which is the
    stage with the samples of the stage before and a step that changes nothing."""
    train_here(config, root / "12", *stage_overrides(12))
    for before, length in itertools.pairwise(LENGTHS):
        source = root / str(before)
        unchanged = stage_overrides(before, positions=length, source=source)
        train_here(config, root / f"before-{length}", *unchanged, *STILL)
        train_here(config, root / str(length), *stage_overrides(length, source=source))


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The config, and the folder of the stages' runs."""
    root = tmp_path_factory.mktemp("stages")
    config = write_encoder_config(root, train={"steps": STAGE_STEPS}, checkpoint={"every_steps": 10})
    run_ranks(1, _stages, config, root)
    return config, root


def last_evaluation(folder: Path) -> dict[str, Any]:
    return {name: lines(folder)[-1][name] for name in EVALUATED}


@pytest.mark.parametrize(("before", "length"), list(itertools.pairwise(LENGTHS)))
def test_a_longer_stage_starts_where_the_last_one_ended(stages, before, length):
    root = stages[1]
    assert last_evaluation(root / f"before-{length}") == last_evaluation(root / str(before))
    ended, started = weights_of_step(root / str(before), STAGE_STEPS), weights_of_step(root / f"before-{length}", 1)
    expected = ended | {POSITION_TABLE: ended[POSITION_TABLE].repeat(length // before, 1)}
    assert started.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(started[name], expected[name])] == []
    found = report(root / str(length))
    assert (found["tiled"], found["new"], found["left"]) == ([POSITION_TABLE], [], [])
    assert found["model_differences"] == [f"model.max_positions: {before} in the checkpoint, {length} in the config"]
    assert [line["step"] for line in lines(root / str(length))] == list(range(1, STAGE_STEPS + 1))


@pytest.mark.parametrize(
    ("world_size", "meshes"),
    [
        (2, {"dp2": []}),
        pytest.param(3, {"cp3": ["parallel.cp=3"]}, marks=pytest.mark.slow),
        pytest.param(4, {"tp2_dp2": ["parallel.tp=2"]}, marks=pytest.mark.slow),
    ],
    ids=["dp2", "cp3", "tp2_dp2"],
)
def test_a_table_of_any_length_is_tiled_on_every_mesh(stages, tmp_path, world_size, meshes):
    """31 rows from 12: two copies and a part, and no multiple of the ranks."""
    config, root = stages
    start = [*stage_overrides(12, positions=31, source=root / "12"), *STILL]
    calls = {tmp_path / name: [*start, *overrides] for name, overrides in meshes.items()}
    assert run_ranks(world_size, _runs, config, calls)[0] == []
    ended = weights_of_step(root / "12", STAGE_STEPS)
    expected = ended | {POSITION_TABLE: torch.cat([ended[POSITION_TABLE]] * 3)[:31]}
    for folder in calls:
        started = weights_of_step(folder, 1)
        assert [name for name in expected if not torch.equal(started[name], expected[name])] == []


def test_a_table_is_never_cut(stages, tmp_path):
    config, root = stages
    ((message,),) = run_ranks(1, _runs, config, {tmp_path / "run": stage_overrides(12, source=root / "24")})
    assert (
        "position_embedding.weight: shape [24, 32] in the checkpoint, [12, 32] in the model; a table of positions "
        "grows, but is never cut: raise model.max_positions"
    ) in message
    assert "model.max_positions: 24 in the checkpoint, 12 in the config" in message
