"""Weights & Biases as an optional sink of a run's metrics."""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import pydantic

from megalin.config import Change, Config
from megalin.errors import ConfigError
from megalin.files import write_atomically
from megalin.optional import require
from megalin.train.jsonl import BestEffortWriter

ID_FILE = "wandb_id"
"""File of a run folder that stores the run's W&B id."""


class LoggingConfig(Config):
    """Destinations of metrics other than the run folder."""

    on_change: ClassVar[Change | None] = "silent"
    wandb_project: str | None = pydantic.Field(default=None, min_length=1)
    """Weights & Biases project that receives the metrics of rank 0; needs the library wandb, whose own settings give
    account and mode (WANDB_MODE=offline, WANDB_ENTITY, ...). Left out: none."""
    prometheus_file: bool = False
    """Write the newest metrics to metrics.prom in the run folder, at most once a second, for the textfile collector of
    Prometheus' node exporter; needs the library prometheus_client."""
    prometheus_port: int | None = pydantic.Field(default=None, ge=1, le=65535)
    """TCP port on 127.0.0.1 of rank 0's host where Prometheus can read the newest metrics (path /metrics); needs the
    library prometheus_client. Left out: none."""


class WeightsAndBiases:
    """The W&B run: created by a run's first process, continued by those that resume it."""

    def __init__(self, folder: Path, project: str, config: Mapping[str, Any], *, resumed: bool) -> None:
        """Starts a W&B run, or continues the one whose id is in `folder`; on rank 0 only.

        Args:
            config: shown by W&B as the run's config.
            resumed: whether this process resumes an earlier one; else the run gets a new id.

        Raises:
            ConfigError: wandb is not installed, or cannot start a run.
        """
        purpose = f"logging.wandb_project = {project!r}"
        self._writer = BestEffortWriter("W&B")
        wandb = require("wandb", purpose, extra="wandb")
        if not hasattr(wandb, "init"):  # W&B's own folder in the working directory imports as an empty package
            raise ConfigError(f"{purpose} needs the library wandb; install it: pip install 'megalin[wandb]'")
        path = folder / ID_FILE
        continued = resumed and path.exists()
        number = path.read_text() if continued else secrets.token_hex(4)
        try:
            self._run = wandb.init(
                project=project,
                id=number,
                resume="allow",
                name=os.environ.get("WANDB_NAME", folder.absolute().name),
                dir=folder,
                config=dict(config),
            )
        except wandb.Error as error:
            raise ConfigError(
                f"{purpose}: W&B cannot start a run ({error}); log in (wandb login), set WANDB_MODE=offline, or "
                "leave the key out"
            ) from None
        if not continued:
            write_atomically(path, number.encode())
        # W&B's own step counter never decreases, and would drop the steps that a resumed run repeats.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, values: Mapping[str, float | int]) -> None:
        """Sends the values of a step, in the background; the first error of the library is logged."""
        self._writer.attempt(lambda: _call(lambda: self._run.log({"step": step, **values})))

    def close(self, *, failed: bool) -> None:
        """Ends the W&B run, marked as failed if `failed`; returns when everything is sent, or cannot be."""
        self._writer.attempt(lambda: _call(lambda: self._run.finish(exit_code=int(failed))))


def _call(function: Callable[[], None]) -> None:
    """Calls a function of the library; any failure becomes the OSError that `BestEffortWriter` handles."""
    try:
        function()
    except Exception as error:  # a dead service raises bare Exception, a full disk its own error
        raise OSError(errno.EIO, f"{type(error).__name__}: {error}") from error
