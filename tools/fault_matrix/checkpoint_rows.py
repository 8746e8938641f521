"""Faults of checkpoints: F53 to F55, F64, F66."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

from fault_matrix.lab import STEPS, Lab, flip, seal, step_folder
from fault_matrix.processes import Outcome
from fault_matrix.table import fault


def _tensor_file(run: Path, step: int = STEPS) -> Path:
    return next(step_folder(run, step).glob("*.safetensors"))


def _expect_step_before(lab: Lab, outcome: Outcome, name: str) -> None:
    lab.expect_success(outcome, "resumed from the step before")
    skipped = [line for line in outcome.text.splitlines() if "checkpoint skipped" in line]
    lab.check("the file is named", any(name in line for line in skipped), outcome.last_line)


@fault("F53", "flipped byte in a tensor file")
def _flipped(lab: Lab) -> None:
    config, run = lab.finished_run()
    path = _tensor_file(run)
    flip(path)
    _expect_step_before(lab, lab.train(config), path.name)


@fault("F54", "truncated or missing file")
def _truncated(lab: Lab) -> None:
    for name in ("truncated", "missing"):
        config, run = lab.finished_run(name)
        path = _tensor_file(run)
        if name == "truncated":
            os.truncate(path, path.stat().st_size - 1)
        else:
            path.unlink()
        _expect_step_before(lab, lab.train(config, folder=name), path.name)


@fault("F55", "tensor file of another step")
def _of_another_step(lab: Lab) -> None:
    config, run = lab.finished_run()
    path = _tensor_file(run)
    shutil.copy(_tensor_file(run, 4), path)
    _expect_step_before(lab, lab.train(config), path.name)


class _Exploit:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.marker),)


_FORGED: dict[str, Any] = {
    "no step": ("step", None),
    "step of another folder": ("step", 4),
    "negative step": ("step", -1),
    "step as text": ("step", "six"),
    "huge step": ("step", 2**70),
    "order a list": ("order", []),
    "order a text": ("order", "x"),
    "order without keys": ("order", {}),
    "config a number": ("config", 7),
    "config without train": ("config", {"model": {}}),
    "config.train a list": ("config", {"model": {}, "train": []}),
    "versions a text": ("versions", "x"),
    "a key more": ("extra", 1),
}
"""Key of a forged train_state.json and its value; None removes the key."""


@fault("F64", "pickles and forged states in a checkpoint")
def _forged(lab: Lab) -> None:
    config, run = lab.finished_run()
    directory = step_folder(run, STEPS)
    for step in (2, 4):
        shutil.rmtree(step_folder(run, step))
    good = {path: path.read_bytes() for path in directory.iterdir()}
    marker = lab.folder / "ran"
    outcomes = {}

    def start() -> Outcome:
        shutil.rmtree(step_folder(run, 7), ignore_errors=True)
        return lab.train(config, "train.steps=7", "schedule.allow_jump=true")

    for path in good:
        path.write_bytes(pickle.dumps(_Exploit(marker)))
        if path.name != "manifest.json":
            seal(directory)
        outcomes[f"pickle in {path.name}"] = start()
        for each, data in good.items():
            each.write_bytes(data)
    state = json.loads((directory / "train_state.json").read_text())
    for name, (key, value) in _FORGED.items():
        changed = {**state, key: value} if value is not None else {k: v for k, v in state.items() if k != key}
        (directory / "train_state.json").write_text(json.dumps(changed))
        seal(directory)
        outcomes[name] = start()
    lab.check("no code runs", not marker.exists())
    accepted = [name for name, outcome in outcomes.items() if outcome.code == 0]
    lab.check("none is accepted", not accepted, ", ".join(accepted))
    wrong = [name for name, outcome in outcomes.items() if outcome.code not in (0, 2, 4) or "Traceback" in outcome.text]
    lab.check("each is one error", not wrong, ", ".join(wrong))


@fault("F66", "links in a run folder")
def _links(lab: Lab) -> None:
    for name in ("loss.png", "tensorboard", "checkpoints", "metrics.jsonl.tmp", "ledger.jsonl.tmp", "metrics.jsonl"):
        config, run = lab.finished_run(name)
        outside = lab.folder / f"outside-{name}"
        kept = run / f"moved-{name}"
        if (run / name).exists():
            (run / name).rename(kept)
        if kept.is_dir():
            shutil.copytree(kept, outside)
        else:
            outside.write_bytes(kept.read_bytes() if kept.exists() else b"precious")
        before = _contents(outside)
        (run / name).symlink_to(outside)
        outcome = lab.train(config, "train.steps=8", folder=name)
        lab.check(f"{name}: nothing written through it", _contents(outside) == before)
        lab.check(f"{name}: no traceback", "Traceback" not in outcome.text, outcome.last_line)
        lab.check(f"{name}: named", name in outcome.text, outcome.last_line)


def _contents(path: Path) -> dict[str, bytes]:
    if path.is_file():
        return {"": path.read_bytes()}
    return {str(each.relative_to(path)): each.read_bytes() for each in sorted(path.rglob("*")) if each.is_file()}
