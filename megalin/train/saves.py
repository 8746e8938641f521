"""Checkpoints of a run, in the foreground or in the background."""

from __future__ import annotations

from megalin.checkpoint.background import BackgroundSaver
from megalin.checkpoint.publishing import prepare
from megalin.checkpoint.save import save_now
from megalin.checkpoint.verification import VerifiedCheckpoints
from megalin.data.shards.watch import ShardWatch
from megalin.data.sources import Training
from megalin.parallel.agreement import on_every_rank
from megalin.parallel.heartbeats import Heartbeat
from megalin.train.config import RunConfig
from megalin.train.engine import Engine
from megalin.train.resume import Resumption, checkpoint_state
from megalin.train.run_folder import RunFolder
from megalin.train.run_log import RunLog


class RunSaves:
    """Saves the engine's state between two steps.

    Args:
        saver: writes in the background; None: every save is in the foreground.
        watch: of the shards, which are compared before a checkpoint of steps that read them.
        resumption: the start of the run, for the record of its identity.
    """

    def __init__(
        self,
        config: RunConfig,
        run: RunFolder,
        engine: Engine,
        heartbeat: Heartbeat,
        saver: BackgroundSaver | None,
        watch: ShardWatch,
        resumption: Resumption,
    ) -> None:
        self._config, self._run, self._engine = config, run, engine
        self._heartbeat, self._saver, self._watch = heartbeat, saver, watch
        self._resumption = resumption
        self._verified = VerifiedCheckpoints()

    def reserve(self) -> None:
        """Allocates the memory of saves in the background; a collective. Raises HostMemoryError on every rank if a host
        does not have it."""
        if self._saver is not None:
            self._saver.reserve(self._run.checkpoints, self._engine.tensors())

    def save(self, step: int, data: Training, log: RunLog, *, wait: bool) -> None:
        """Saves the state after `step`, while no later step is launched; a collective.

        Args:
            data: the data that the steps have read.
            wait: the checkpoint is published before this returns, in a background run too.

        Raises:
            StorageError: on every rank, if this checkpoint or the one in flight before it cannot be written.
            DataError: on every rank, if bytes of a shard have changed since the run verified them; nothing is saved.
        """
        with log.timed_save(step), self._heartbeat.in_phase("save"):
            self.finish(log)
            on_every_rank(self._watch.check)
            log.sync()
            tensors = self._engine.tensors()
            publication = prepare(
                self._run.checkpoints,
                step=step,
                tensors=tensors,
                state=checkpoint_state(self._config, data, step, self._resumption),
                keep_latest=self._config.checkpoint.keep_latest,
                keep_steps=self._kept_steps(step),
                verified=self._verified,
            )
            if self._saver is None or wait:
                save_now(publication, tensors)
            elif (copied := self._saver.start(publication, tensors)) is not None:
                self._engine.wait_before_update(copied)

    def _kept_steps(self, step: int) -> list[int]:
        """Steps whose checkpoints stay: those of the config, and, where this one is not scheduled, the newest scheduled
        one, which a rollback would restore."""
        checkpoint = self._config.checkpoint
        if self._config.train.on_spike != "rollback" or not checkpoint.every_steps or checkpoint.is_scheduled(step):
            return checkpoint.keep_steps
        return [*checkpoint.keep_steps, step // checkpoint.every_steps * checkpoint.every_steps]

    def has_ended(self) -> bool:
        """Whether this rank's thread has ended with the save in flight; no collective."""
        return self._saver is not None and self._saver.has_ended()

    def finish(self, log: RunLog) -> None:
        """Waits for the save in flight, if there is one, and logs its duration; a collective.

        Raises:
            StorageError, RankStalledError, MegalinError: on every rank, if it failed on any.
        """
        written = None if self._saver is None else self._saver.finish()
        if written is not None:
            log.add_written(written)
