"""A run's metrics in Weights & Biases, where its config asks for them."""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pydantic

from megalin.config import Config
from megalin.errors import ConfigError
from megalin.files import write_atomically
from megalin.optional import require
from megalin.train.jsonl import Outlet

ID_FILE = "wandb_id"
"""The file of a run folder that keeps the id under which W&B knows the run."""


class LoggingConfig(Config):
    """Where metrics go beside the run folder."""

    wandb_project: str | None = pydantic.Field(default=None, min_length=1)
    """Project of Weights & Biases that gets the metrics of rank 0; needs the library wandb, whose own settings say as
    whom and how (WANDB_MODE=offline, WANDB_ENTITY, ...). Left out: none."""


class WeightsAndBiases:
    """The run in W&B: made by a run's first process, gone on with by those that resume it."""

    def __init__(self, folder: Path, project: str, config: Mapping[str, Any], *, resumed: bool) -> None:
        """Begins the run, or goes on with the one of the id in `folder`; rank 0 alone.

        Args:
            config: what W&B shows as the run's config.
            resumed: whether steps of an earlier process are gone on from; else the run gets an id of its own.

        Raises:
            ConfigError: wandb is not installed, or does not begin a run.
        """
        purpose = f"logging.wandb_project = {project!r}"
        self._outlet = Outlet("W&B")
        wandb = require("wandb", purpose, extra="wandb")
        if not hasattr(wandb, "init"):  # a folder that W&B left where one works imports as an empty package
            raise ConfigError(f"{purpose} needs the library wandb; install it: pip install 'megalin[wandb]'")
        path = folder / ID_FILE
        if not (resumed and path.exists()):
            write_atomically(path, secrets.token_hex(4).encode())
        try:
            self._run = wandb.init(
                project=project,
                id=path.read_text(),
                resume="allow",
                name=os.environ.get("WANDB_NAME", folder.absolute().name),
                dir=folder,
                config=dict(config),
            )
        except wandb.Error as error:
            raise ConfigError(
                f"{purpose}: W&B does not begin a run ({error}); log in (wandb login), set WANDB_MODE=offline, or "
                "leave the key out"
            ) from None
        # W&B's own count of steps never goes back, and would drop those that a resumed run does again.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, values: Mapping[str, float | int]) -> None:
        """Sends the values of a step, in the background; an error of the library is warned about once."""
        self._outlet.attempt(lambda: _call(lambda: self._run.log({"step": step, **values})))

    def close(self, *, failed: bool) -> None:
        """Ends the run in W&B, as one that failed where an error ended it; returns when all is sent, or cannot be."""
        self._outlet.attempt(lambda: _call(lambda: self._run.finish(exit_code=int(failed))))


def _call(function: Callable[[], None]) -> None:
    """Calls what of the library may fail in mid-run. Raises OSError, as any place does that cannot be written."""
    try:
        function()
    except Exception as error:  # of a service that died it raises bare Exception, of a full disk what it met
        raise OSError(errno.EIO, f"{type(error).__name__}: {error}") from error
