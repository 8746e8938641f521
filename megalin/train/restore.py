"""Opening a finished or interrupted run for reading: its config and its newest checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megalin.checkpoint.load import newest
from megalin.checkpoint.manifest import Checkpoint
from megalin.errors import CheckpointError
from megalin.train.config import RunConfig, load_run_config


def open_run(folder: str | Path, overrides: Sequence[str] = ()) -> tuple[RunConfig, Checkpoint]:
    """The config that a run folder keeps, with overrides, and the newest checkpoint that verifies.

    Raises:
        ConfigError: no run folder, or a config that does not parse.
        CheckpointError: no checkpoint, or none that verifies.
    """
    config = load_run_config(Path(folder) / "config.toml", overrides)
    checkpoint = newest(Path(folder) / "checkpoints")
    if checkpoint is None:
        raise CheckpointError(f"{folder}: the run has no checkpoint yet; train it first (megalin train)")
    return config, checkpoint
