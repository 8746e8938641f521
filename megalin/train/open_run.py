"""Opening a finished or interrupted run for reading: its config and a checkpoint."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Literal

from megalin.checkpoint.load import newest, of_step, saved_steps
from megalin.checkpoint.manifest import Checkpoint
from megalin.config import translate_renamed
from megalin.errors import CheckpointError, ConfigError
from megalin.model.config import AnyModelConfig, parse_model
from megalin.train.config import RunConfig, load_saved_config
from megalin.train.config_file import CHECKPOINTS_NAME
from megalin.train.identity import IdentityEntry, model_entries

Steps = int | Literal["newest", "all"]
"""Finished steps of a checkpoint, the newest checkpoint, or all checkpoints of a run."""

_MOST_DIFFERENCES = 8


def selected_steps(folder: str | Path, steps: Steps) -> list[int | None]:
    """The `step` of `open_run` for each selected checkpoint of a run, in ascending order.

    A run without a checkpoint yields [None], for which `open_run` raises. One broadcast with steps = "all".
    """
    if steps == "all":
        return [*saved_steps(Path(folder) / CHECKPOINTS_NAME)] or [None]
    return [None if steps == "newest" else steps]


def open_run(
    folder: str | Path, overrides: Sequence[str] = (), *, step: int | None = None, mixers: Collection[str] = ()
) -> tuple[RunConfig, Checkpoint]:
    """Reads a run folder's config, with overrides, and a checkpoint that verifies.

    Args:
        step: finished steps of the checkpoint; None: the newest one.
        mixers: packages of mixers that the run's config may import (`external_module`).

    Raises:
        ConfigError: not a run folder, or a config that does not parse.
        CheckpointError: no checkpoint (of this step), none that verifies, or one of a different model.
    """
    config = load_saved_config(folder, overrides, mixers)
    root = Path(folder) / CHECKPOINTS_NAME
    checkpoint = newest(root) if step is None else of_step(root, step)
    if checkpoint is None:
        raise CheckpointError(f"{folder}: the run has no checkpoint yet; train it first (megalin train)")
    check_same_model(config.model, checkpoint)
    return config, checkpoint


def check_same_model(model: AnyModelConfig, checkpoint: Checkpoint) -> None:
    """Checks that the checkpoint is of this model: a different one may have tensors of the same shapes.

    Raises:
        CheckpointError: naming the fields that differ, with both values.
    """
    if differences := model_differences(model, saved_model(checkpoint)):
        raise CheckpointError(
            f"{checkpoint.path} is of another model; restore these values or start in a new run folder:\n  "
            + "\n  ".join(differences[:_MOST_DIFFERENCES])
        )


def saved_model(checkpoint: Checkpoint) -> AnyModelConfig:
    """The model's config in a checkpoint. Of mixers of other packages it imports none but those of MEGALIN_MIXERS.
    Raises CheckpointError if this version cannot read it."""
    try:
        table = {"model": checkpoint.state()["config"]["model"]}
        return parse_model(translate_renamed(table)["model"], "its saved config")
    except (ConfigError, KeyError, TypeError) as error:
        raise CheckpointError(f"{checkpoint.path}: this version cannot read the model of its config: {error}") from None


def model_differences(model: AnyModelConfig, saved: AnyModelConfig) -> list[str]:
    """Fields that define a model's function and differ from those of a checkpoint's model, with both values."""
    there, here = model_entries(saved), model_entries(model)
    changed = [name for name in here | there if there.get(name) != here.get(name)]
    return [
        f"{name}: {_value(there.get(name))} in the checkpoint, {_value(here.get(name))} in the config"
        for name in changed
        if (here.get(name) or there[name]).change == "refused"
    ]


def _value(entry: IdentityEntry | None) -> str:
    return repr(None if entry is None else entry.value)
