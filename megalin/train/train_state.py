"""The state of a run in a checkpoint, `train_state.json`: its schema, checked before anything of it is used."""

from __future__ import annotations

from typing import Annotated, Any

import pydantic

from megalin.checkpoint.index import first_problem
from megalin.checkpoint.manifest import STATE_FILE, Checkpoint
from megalin.config import Config
from megalin.data.shards.verification import parse_record
from megalin.data.sources import SHARD_DIGESTS
from megalin.errors import CheckpointError
from megalin.train.identity_file import Segment


def _has_tables(config: dict[str, Any]) -> dict[str, Any]:
    for name in ("model", "train"):
        if not isinstance(config.get(name), dict):
            raise ValueError(f"{name} is not a table")
    return config


def _has_records(order: dict[str, Any] | None) -> dict[str, Any] | None:
    try:
        for record in (each for shards in ((order or {}).get(SHARD_DIGESTS) or {}).values() for each in shards):
            parse_record(record)
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(f"{SHARD_DIGESTS}: not the records of shards") from None
    return order


class TrainState(Config):
    """Content of `train_state.json`."""

    step: int = pydantic.Field(ge=0)
    """Finished optimizer steps."""
    order: Annotated[dict[str, Any] | None, pydantic.AfterValidator(_has_records)]
    """Everything that determines the order of samples; None: weights without a step of a run, as after an import."""
    config: Annotated[dict[str, Any], pydantic.AfterValidator(_has_tables)]
    """The run's config, as its version wrote it."""
    versions: dict[str, str]
    """Versions of the libraries."""
    inputs: dict[str, Any] = pydantic.Field(default={})
    """The identity of the run besides config and samples (`identity.run_entries`)."""
    segments: list[Segment] = pydantic.Field(default=[])
    """Starts from a checkpoint at which values changed, in order."""
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
