"""The state of a run in a checkpoint, `train_state.json`: its schema, checked before anything of it is used."""

from __future__ import annotations

from typing import Annotated, Any

import pydantic

from megalin.checkpoint.index import first_problem
from megalin.checkpoint.manifest import STATE_FILE, Checkpoint
from megalin.config import Config
from megalin.errors import CheckpointError


def _has_tables(config: dict[str, Any]) -> dict[str, Any]:
    for name in ("model", "train"):
        if not isinstance(config.get(name), dict):
            raise ValueError(f"{name} is not a table")
    return config


class TrainState(Config):
    """Content of `train_state.json`."""

    step: int = pydantic.Field(ge=0)
    """Finished optimizer steps."""
    order: dict[str, Any] | None
    """Everything that determines the order of samples; None: weights without a step of a run, as after an import."""
    config: Annotated[dict[str, Any], pydantic.AfterValidator(_has_tables)]
    """The run's config, as its version wrote it."""
    versions: dict[str, str]
    """Versions of the libraries."""
    source: dict[str, str] | None = None
    """Folder and class of imported weights."""


def read_state(checkpoint: Checkpoint) -> TrainState:
    """Reads and checks the state of a checkpoint.

    Raises:
        CheckpointError: it is missing, not JSON, of another form, or of another step than the checkpoint.
    """
    path = checkpoint.path / STATE_FILE
    try:
        state = TrainState.model_validate(checkpoint.state())
    except pydantic.ValidationError as error:
        raise CheckpointError(f"{path}: not the state of a run: {first_problem(error)}") from None
    if state.step != checkpoint.step:
        raise CheckpointError(f"{path}: is of step {state.step}, but the checkpoint is of step {checkpoint.step}")
    return state
