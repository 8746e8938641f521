"""Refused starts of `megalin train`: an earlier run's folder stays as it was, and no new folder is left."""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from megalin.train.run_folder import RunFolder

CONFIG, DATA, CHECKPOINT, STORAGE = 2, 3, 4, 5
ENDED = {"pid": 1, "host": "elsewhere", "since": "2026-11-21T10:00:00+00:00"}


def contents(folder: Path) -> dict[str, str]:
    """Every entry of the folder with a digest of its bytes; folders have none."""
    entries = sorted(folder.rglob("*"))
    return {
        str(entry.relative_to(folder)): hashlib.sha256(entry.read_bytes()).hexdigest() if entry.is_file() else ""
        for entry in entries
    }


@pytest.fixture
def killed(trained: Path, tmp_path: Path) -> Path:
    """A copy of the run as a killed process leaves it: a dead owner, steps after the newest checkpoint, and a line of
    incidents that is torn; with the settings of DeepSpeed, and without TensorBoard's folder."""
    run = Path(shutil.copytree(trained, tmp_path / "run"))
    shutil.rmtree(run / "checkpoints" / "step-00000012")
    shutil.rmtree(run / "tensorboard")
    (run / ".lock").write_text(json.dumps(ENDED))
    (run / "deepspeed.json").write_text('{"of": "the earlier run"}')
    (run / "initial_weights.json").write_text('{"of": "the earlier run"}')
    with (run / "incidents.jsonl").open("a") as file:
        file.write('{"step": 4, "ki')
    return run


ORDER = "train.seed=3"  # another order of the samples than the checkpoint's
DEEPSPEED = ["train.engine=deepspeed", ORDER]
MEGATRON = ["data.order=megatron", "data.packing=concatenate"]


@pytest.mark.parametrize(
    ("code", "new", "overrides"),
    [
        pytest.param(CONFIG, CONFIG, ["train.steps=0"], id="bad config"),
        pytest.param(CONFIG, CONFIG, ["parallel.tp=3"], id="mesh that does not divide"),
        pytest.param(CONFIG, None, [ORDER], id="other order"),
        pytest.param(CONFIG, None, MEGATRON, id="other order with an index"),
        pytest.param(CONFIG, None, DEEPSPEED, id="deepspeed", marks=pytest.mark.slow),
        pytest.param(CONFIG, CONFIG, ["evaluation.tasks=['nothing']"], id="unknown task"),
        pytest.param(CONFIG, CHECKPOINT, ["train.initial_weights=nowhere"], id="missing weights"),
        pytest.param(CONFIG, CONFIG, ["logging.wandb_project=mine"], id="missing library"),
        pytest.param(CONFIG, CONFIG, ["logging.prometheus_file=true"], id="missing library of Prometheus"),
        pytest.param(CONFIG, None, [], id="busy folder"),
        pytest.param(DATA, DATA, ["data.train=['missing']"], id="missing data"),
        pytest.param(CONFIG, CONFIG, ["model.vocab_size=256"], id="tokenizer that does not fit"),
        pytest.param(CHECKPOINT, None, ["model.hidden_size=24"], id="other model"),
        pytest.param(CHECKPOINT, None, ["train.steps=6"], id="finished steps beyond the end"),
        pytest.param(CHECKPOINT, None, [], id="damaged checkpoints"),
        pytest.param(STORAGE, None, [], id="link among its files"),
    ],
)
def test_a_refused_start_leaves_folders_as_they_were(
    request, killed, config, tmp_path, fails, monkeypatch, code, new, overrides
):
    """`code` is the exit code in the folder of an earlier run, `new` in a new one; None where that is no error."""
    for library in ("wandb", "prometheus_client"):
        monkeypatch.setitem(sys.modules, library, None)
    if request.node.callspec.id == "link among its files":
        (killed / "loss.png").unlink()
        (killed / "loss.png").symlink_to(config)
    if request.node.callspec.id == "damaged checkpoints":
        for manifest in killed.glob("checkpoints/*/manifest.json"):
            manifest.unlink()
    with RunFolder(killed) if request.node.callspec.id == "busy folder" else nullcontext():
        before = contents(killed)
        fails(code, "train", config, "--folder", killed, *overrides)
        assert contents(killed) == before
    if new is not None:
        (tmp_path / "empty").mkdir()
        for folder in (tmp_path / "new" / "run", tmp_path / "empty"):
            fails(new, "train", config, "--folder", folder, *overrides)
        assert not (tmp_path / "new").exists()
        assert contents(tmp_path / "empty") == {}
