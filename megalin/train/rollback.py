"""Rollbacks of a run: the newest checkpoint before a spike, and the batches since then, which the run leaves out."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pydantic

from megalin.checkpoint.config import CheckpointConfig
from megalin.checkpoint.index import first_problem
from megalin.checkpoint.load import newest
from megalin.checkpoint.manifest import STATE_FILE, Checkpoint
from megalin.checkpoint.publishing import remove_between
from megalin.config import Config
from megalin.data.skipped_batches import SkippedBatches
from megalin.data.sources import SKIPPED_BATCHES, Training
from megalin.errors import CheckpointError, NumericError
from megalin.files import read_limited
from megalin.parallel.agreement import on_rank_zero, rank
from megalin.train.in_flight import FinishedStep
from megalin.train.run_folder import RunFolder
from megalin.train.train_state import TrainState, read_state

_LIMIT_BYTES = 1 << 24

_log = logging.getLogger(__name__)


class Rollback(Config):
    """A rollback, as `rollbacks.json` has it."""

    step: int = pydantic.Field(ge=0)
    """Finished steps of the checkpoint."""
    spike_step: int = pydantic.Field(ge=1)
    """The step that was a spike."""
    first_batch: int = pydantic.Field(ge=1)
    """First batch of the sample order that is left out: that of the step after the checkpoint."""
    last_batch: int = pydantic.Field(ge=1)
    """Last one: that of the spike."""
    loss: float
    """Loss of the spike, nats a token."""
    grad_norm: float
    """L2 norm of its gradient before clipping."""

    @property
    def window(self) -> tuple[int, int]:
        """First and last batch that are left out."""
        return self.first_batch, self.last_batch


class _Content(Config):
    """Content of `rollbacks.json`."""

    rollbacks: list[Rollback]


class Rollbacks:
    """The rollbacks of a run so far, equal on every rank, and their file in the run folder.

    A rollback is written to the disk before the checkpoint is restored. So a process that dies later resumes from this
    checkpoint with the same batches left out, and one that dies before finds the same spike again.
    """

    def __init__(self, run: RunFolder, most: int) -> None:
        """Reads the file, if there is one. Every rank creates one (one broadcast).

        Args:
            most: rollbacks of the whole run (`train.max_rollbacks`).

        Raises:
            CheckpointError: on every rank, if the file is not that of a run.
        """
        self._run, self._most, self._is_changed = run, most, False
        self._done = on_rank_zero(lambda: _read(run.rollbacks), _Content).rollbacks

    def resume(self, checkpoint: Checkpoint | None, data: Training) -> Training:
        """The data of a run that continues from a checkpoint: without the batches that it or a rollback left out. Later
        rollbacks are dropped, as later lines of the ledger are.

        Raises:
            CheckpointError: the checkpoint was trained on batches that a rollback left out.
        """
        kept = [each for each in self._done if checkpoint is not None and each.step <= checkpoint.step]
        self._is_changed, self._done = len(kept) < len(self._done), kept
        if checkpoint is None:
            return data
        saved = skipped_before(checkpoint)
        for each in kept:
            if each.step < checkpoint.step and saved.union(each.window) != saved:
                raise CheckpointError(
                    f"{checkpoint.path} was trained on batches {each.first_batch} to {each.last_batch}, which the run "
                    f"left out when it rolled back to step {each.step}: it was not valid then. Move it away to "
                    "continue from an earlier checkpoint"
                )
        return data._replace(skipped=saved.union(*(each.window for each in kept)))

    def begin(self) -> None:
        """Removes dropped rollbacks from the file; a collective. Raises StorageError on every rank."""
        if self._is_changed:
            self._write()

    def find(self, spike: FinishedStep) -> Checkpoint | None:
        """The checkpoint to restore after a spike: the newest valid one before it of those that the config schedules;
        None if there is none yet. A collective, after the save in flight.

        An unscheduled one, as after a SIGTERM, is passed over: an uninterrupted run does not have it, and would leave
        out other batches.

        Raises:
            NumericError: the run has no rollback left.
            CheckpointError: there are checkpoints, and none is valid.
        """
        if len(self._done) >= self._most:
            before = ", ".join(f"from step {each.spike_step} to {each.step}" for each in self._done) or "none"
            raise NumericError(
                f"step {spike.step}: a spike after {len(self._done)} rollbacks ({before}), and train.max_rollbacks = "
                f"{self._most} allows no more; its update was left out, and the checkpoints are unchanged. Lower "
                "optimizer.lr, look at the samples of the step, or raise train.max_rollbacks, and run the same command"
            )
        end = spike.step
        while (checkpoint := newest(self._run.checkpoints, before=end)) is not None:
            if (state := read_state(checkpoint)).order is not None and is_scheduled(state):
                return checkpoint
            end = checkpoint.step
        if rank() == 0:
            _log.warning("no checkpoint before step %d to roll back to: the run goes on after it", spike.step)
        return None

    def add(self, checkpoint: Checkpoint, spike: FinishedStep, data: Training) -> Training:
        """Writes a rollback to the disk, and returns the data without the batches from the checkpoint to the spike; a
        collective. Raises StorageError on every rank.

        Checkpoints in between are removed first: they have updates by batches that the run leaves out from now on, so
        that it could neither resume from them nor save these steps again.
        """
        on_rank_zero(lambda: remove_between(self._run.checkpoints, checkpoint.step, spike.step))
        first, last = data.skipped.batch(checkpoint.step + 1), spike.launched.batch
        loss, norm = spike.result.loss, spike.result.grad_norm
        rollback = Rollback(
            step=checkpoint.step, spike_step=spike.step, first_batch=first, last_batch=last, loss=loss, grad_norm=norm
        )
        self._done.append(rollback)
        self._write()
        return data._replace(skipped=data.skipped.union(rollback.window))

    def report_last(self) -> None:
        """Logs a warning on rank 0 about the last rollback."""
        last = self._done[-1]
        if rank() == 0:
            _log.warning(
                "rolled back from step %d to the checkpoint of step %d: batches %d to %d of the sample order are left "
                "out (rollback %d of train.max_rollbacks = %d)",
                *(last.spike_step, last.step, last.first_batch, last.last_batch, len(self._done), self._most),
            )

    def _write(self) -> None:
        content = _Content(rollbacks=self._done).model_dump(mode="json")
        on_rank_zero(lambda: self._run.write_json(self._run.rollbacks, content))


def is_scheduled(state: TrainState) -> bool:
    """Whether a checkpoint was saved where its config schedules one, and not only where its process was stopped.

    Raises:
        CheckpointError: its config has another form.
    """
    try:
        table = {name: state.config["checkpoint"][name] for name in ("every_steps", "keep_steps")}
        return CheckpointConfig.model_validate(table).is_scheduled(state.step)
    except (KeyError, TypeError, pydantic.ValidationError):
        raise CheckpointError(
            f"{STATE_FILE} of step {state.step}: its config has no checkpoint.every_steps and keep_steps; restore it, "
            "or move the checkpoint away"
        ) from None


def skipped_before(checkpoint: Checkpoint) -> SkippedBatches:
    """The windows of batches that the steps of a checkpoint left out.

    Raises:
        CheckpointError: its state has them in another form.
    """
    order = read_state(checkpoint).order or {}
    try:
        return SkippedBatches.from_json(order.get(SKIPPED_BATCHES, []))
    except ValueError as error:
        raise CheckpointError(f"{checkpoint.path}: {SKIPPED_BATCHES} of train_state.json = {error}") from None


def _read(path: Path) -> _Content:
    if not path.exists():
        return _Content(rollbacks=[])
    try:
        return _Content.model_validate(json.loads(read_limited(path, limit_bytes=_LIMIT_BYTES, follow_links=False)))
    except pydantic.ValidationError as error:
        problem = first_problem(error)
    except (ValueError, RecursionError):
        problem = "no JSON"
    raise CheckpointError(
        f"{path}: not the rollbacks of a run ({problem}); restore it, or move it away: batches left out after the "
        "newest checkpoint are then read again"
    )
