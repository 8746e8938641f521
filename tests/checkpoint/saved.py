"""Small checkpoints of plain tensors, and helpers to damage or forge them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from megalin.checkpoint.background import BackgroundSaver
from megalin.checkpoint.manifest import MANIFEST_FILE, FileRecord
from megalin.checkpoint.publishing import prepare
from megalin.checkpoint.save import save


def tensors(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {
        "embedding.weight": torch.randn(12, 4, generator=generator),
        "head.weight": torch.randn(4, 6, generator=generator).to(torch.bfloat16),
        "optim.state.embedding.weight.step": torch.tensor(float(step)),
    }


def write(root: Path, *steps: int, keep: int | None = None) -> Path:
    """Saves each step; returns the last one's directory."""
    for step in steps:
        target = save(root, step=step, tensors=tensors(step), state={"step": step}, keep_latest=keep)
    return target


def write_in_background(root: Path, *steps: int, keep: int | None = None) -> None:
    """Saves each step in the background, one after the other."""
    saver = BackgroundSaver(60.0)
    with saver.completing():
        for step in steps:
            saved = tensors(step)
            saver.start(prepare(root, step=step, tensors=saved, state={"step": step}, keep_latest=keep), saved)
            saver.finish()


def names(root: Path) -> list[str]:
    """Names of the entries of the root, without the lock."""
    return sorted(entry.name for entry in root.iterdir() if entry.name != ".lock")


def edit_json(path: Path, *keys: str, value: Any) -> None:
    """Replaces one value of a JSON file."""
    document = json.loads(path.read_text())
    place = document
    for key in keys[:-1]:
        place = place[int(key)] if isinstance(place, list) else place[key]
    place[keys[-1]] = value
    path.write_text(json.dumps(document))


def seal(directory: Path) -> None:
    """Updates the manifest to match changed files, as a forger would."""
    manifest = json.loads((directory / MANIFEST_FILE).read_text())
    for name in manifest["files"]:
        manifest["files"][name] = FileRecord.of((directory / name).read_bytes()).model_dump()
    (directory / MANIFEST_FILE).write_text(json.dumps(manifest))
