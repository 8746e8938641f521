"""The training loop: launch a step, finish the one before it, and evaluate and save where due."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import closing, nullcontext
from pathlib import Path
from typing import NamedTuple, NoReturn

import torch

from megalin.checkpoint.background import BackgroundSaver
from megalin.config import dumps
from megalin.data.loader import ValidationLoader
from megalin.errors import PreemptedError, StorageError
from megalin.optim.schedule import learning_rate
from megalin.parallel.collectives import SYNCHRONOUS_DEVICES
from megalin.parallel.mesh import Mesh
from megalin.parallel.rank_failures import default_rendezvous, no_verdict, report_failed_ranks
from megalin.parallel.watchdog import Watchdog
from megalin.train.config import RunConfig
from megalin.train.curves import write_loss_curve
from megalin.train.due_steps import DueSteps
from megalin.train.engine_choice import make_engine
from megalin.train.environment import device_name, environment
from megalin.train.events import EventLog
from megalin.train.garbage_collection import without_long_collections
from megalin.train.host_memory import report_host_memory
from megalin.train.identity import check_same_start
from megalin.train.in_flight import FinishedStep, InFlightStep, InFlightSteps, naming_samples
from megalin.train.initial_weights import find_initial_weights, load_initial_weights
from megalin.train.pipeline_model import Pipeline
from megalin.train.preemption import PreemptionHandler
from megalin.train.replicas import ReplicaCheck
from megalin.train.resume import find_checkpoint, resume
from megalin.train.rollback import Rollbacks
from megalin.train.run_data import open_run_data
from megalin.train.run_folder import RunFolder
from megalin.train.run_log import RunLog, open_run_log
from megalin.train.saves import RunSaves
from megalin.train.spikes import SpikeReading
from megalin.train.start_lines import start_lines
from megalin.train.step_data import DataFailure, Preemption, StepData, StepReader, describe_samples, training_loader
from megalin.train.stragglers import OwnTime, StragglerMonitor
from megalin.train.tasks import TaskRunner, check_tasks
from megalin.train.update_hooks import UpdateHook
from megalin.train.validation import AnyEvaluation, Evaluation, evaluate
from megalin.train.watched import watched

_log = logging.getLogger(__name__)

_EVALUATED_SAMPLES = 1000
"""Samples of an evaluation where `train.evaluate_batches` is left out."""


class TrainResult(NamedTuple):
    """Outcome of a run."""

    step: int
    """Finished steps."""
    loss: float | None
    """Loss of the last step, nats a token; None if no step was left."""
    evaluation: AnyEvaluation | None
    """Evaluation of the validation split after the last step; None without one."""
    tasks: dict[str, float]
    """Results of `evaluation.tasks` after the last step, by TASK/METRIC; empty without tasks."""


class TrainingLoop:
    """One run on this rank's mesh, from its first step or from the newest checkpoint of its folder.

    Every rank creates one, inside an initialised process group.

    Attributes:
        resumed_step: finished steps in the loaded checkpoint; 0 without one.
        last_step: the step after which the run ends.
    """

    def __init__(
        self,
        config: RunConfig,
        mesh: Mesh,
        run: RunFolder,
        event_log: EventLog,
        hooks: Sequence[UpdateHook] = (),
        tasks: TaskRunner | None = None,
        watchdog: Watchdog | None = None,
        saver: BackgroundSaver | None = None,
    ) -> None:
        """Opens the data, builds the model, and loads the newest checkpoint if there is one, else that of the run to
        branch from or the initial weights if the config names some.

        Raises:
            ConfigError: a checkpoint with a different sample order.
            DataError: on every rank, when shards or a tokenizer are bad or missing on any rank, or have other bytes
                than their manifest, the run before, or another rank.
            CheckpointError: a checkpoint of a different model, or none that verifies; initial weights that do not fit.
        """
        self.config, self.mesh, self.run, self.event_log, self.tasks = config, mesh, run, event_log, tasks
        self._watchdog, self._heartbeat = watchdog, mesh.launches
        # Ranks of a sample wait for each other in blocks, which on GPUs is not measured.
        together = 1 if mesh.device.type in SYNCHRONOUS_DEVICES else mesh.tp.axis.size * mesh.cp.axis.size
        self._stragglers, self._own_seconds = StragglerMonitor(together), 0.0
        self.data, self.validation, self.token_bytes, inputs, self.shards = open_run_data(config, run, mesh)
        self._rollbacks = Rollbacks(run, config.train.max_rollbacks)
        self._resumption = find_checkpoint(run.checkpoints, config, self.data, inputs)
        checkpoint = self._resumption.checkpoint
        self.data = self._rollbacks.resume(checkpoint, self.data)
        source = find_initial_weights(config, run.checkpoints)
        self.engine = make_engine(config, mesh, hooks)
        self.model = self.engine.model
        self.resumed_step = 0 if checkpoint is None else resume(checkpoint, self.engine)
        watch, start = self.shards.watch, self._resumption
        self._saves = RunSaves(config, run, self.engine, mesh.launches, saver, watch, start)
        self.initial_weights = None if source is None else load_initial_weights(source, config, self.engine)
        self.last_step = config.train.stop_after_steps or config.train.steps
        self._replicas = ReplicaCheck(mesh, self.engine.replicas() if config.train.compare_replicas_every_steps else {})
        self._due = DueSteps(config, self.resumed_step, self.last_step, self.validation is not None, tasks is not None)

    def train(self) -> TrainResult:
        """Runs the remaining steps, saving as configured and after the last one.

        While the device runs a step, the host finishes the step before: one step is in flight. A step after which
        something is due is finished before the next one's samples are read (docs/adr/0012). A rollback drops the step
        in flight, and goes on after the last step of a checkpoint (docs/adr/0019).

        Raises:
            NumericError: a loss or gradient that is not finite, or a spike after too many rollbacks; nothing is saved.
            ReplicaError: on every rank, for copies of a tensor that differ; nothing is saved.
            DataError: on every rank, for a token id beyond the vocabulary or an unreadable shard on any rank.
            PreemptedError: on every rank, after SIGTERM or Ctrl-C on any; the current step is finished and saved first.
        """
        in_flight = InFlightSteps(self._describe_samples)
        finished: FinishedStep | None = None
        evaluation: AnyEvaluation | None = None
        tasks: dict[str, float] = {}
        with (
            training_loader(self.config, self.data, self.mesh, self.shards.watch) as loader,
            open_run_log(
                self.config, self.mesh, self.run, self.model, self.event_log, resumed_step=self.resumed_step
            ) as log,
            PreemptionHandler() as preemption,
            without_long_collections() as freeze,
        ):
            self._saves.reserve()
            self._begin()
            log.print_lines(self._report_lines())
            reader = StepReader(loader, self.mesh, preemption, self._saves.has_ended)
            self._heartbeat.enter("first step")
            step = self.resumed_step
            while step < self.last_step:
                step += 1
                data = reader.read(self.data.skipped.batch(step), own_seconds=self._own_seconds)
                self._own_seconds = 0.0
                if data.save_has_ended:
                    self._saves.finish(log)
                if data.stop is None:
                    in_flight.push(self._launch(step, data))
                for finished in in_flight.finished(drain=data.stop is not None or self._due.has_any(step)):
                    if (restored := self._roll_back(finished, in_flight, log)) is not None:
                        step = restored
                        break
                    evaluation, tasks = self._finish(finished, log)
                else:
                    if data.stop is not None:
                        self._stop_early(data.stop, step - 1, log)
                    if self._due.is_first(step):
                        freeze()
            self._heartbeat.enter("end")
            log.write_rest()
        if finished is not None or not self.run.loss_curve.is_file():
            self._write_loss_curve(evaluation)
        loss = None if finished is None else finished.result.loss
        return TrainResult(max(self.last_step, self.resumed_step), loss, evaluation, tasks)

    def _begin(self) -> None:
        """Makes the folder this run's, when nothing can refuse the run any more."""
        run = self.run
        run.keep()
        run.write_text(run.config, dumps(self.config))
        run.write_json(run.environment, environment(self.mesh))
        run.write_json(run.identity, self._resumption.values(self.config))
        if self.shards.kept:
            run.write_json(run.shard_digests, self.shards.kept)
        if self.engine.settings:
            run.write_json(run.deepspeed, self.engine.settings)
        if self.initial_weights is not None:
            run.write_json(run.initial_weights, self.initial_weights._asdict())
        self._rollbacks.begin()
        where = f"on {torch.distributed.get_world_size()} x {device_name(self.mesh.device)}"
        self.event_log.begin(self.resumed_step, where, self._resumption.report_lines())

    def _finish(self, finished: FinishedStep, log: RunLog) -> tuple[AnyEvaluation | None, dict[str, float]]:
        """Logs a step, evaluates and saves after it where due; returns the evaluation and the results of tasks."""
        step, result = finished.step, finished.result
        if self._due.is_first(step):
            log.write_kernels()
            self._heartbeat.enter("step")
        self._own_seconds = result.own_seconds or self._own_seconds
        if self._watchdog is not None:
            self._watchdog.add_step(result.seconds)
        with log.timed("evaluation_seconds", self._due.evaluation(step)):
            evaluation = self._evaluate_if_due(step)
        with log.timed("tasks_seconds", self._due.tasks(step)):
            tasks = self._run_tasks_if_due(step)
        log.print_lines(self.engine.report_lines())
        log.write(finished, evaluation, tasks)
        if self._due.save(step):
            self._saves.save(step, self.data, log, wait=step == self.last_step)
        return evaluation, tasks

    def _roll_back(self, finished: FinishedStep, in_flight: InFlightSteps, log: RunLog) -> int | None:
        """Warns of a step that is a spike. Undoes the steps since the newest scheduled checkpoint where configured, and
        returns its number of steps; None: the run goes on. Raises NumericError after too many rollbacks."""
        if finished.result.spike is None or not finished.result.spike.found:
            return None
        self._warn_of_spike(finished, finished.result.spike)
        if self.config.train.on_spike != "rollback":
            return None
        self.engine.timer.pause()
        self.mesh.launch_order.compare()  # else this rank may wait forever for the step in flight
        with self._heartbeat.in_phase("rollback"), naming_samples(finished.step, self._describe_samples):
            self._saves.finish(log)
            checkpoint = self._rollbacks.find(finished)
            if checkpoint is None:
                return None
            in_flight.drop()
            self.data = self._rollbacks.add(checkpoint, finished, self.data)
            self.engine.load(checkpoint)
            log.rewind(checkpoint.step)
            self.resumed_step = checkpoint.step  # a SIGTERM now has steps to save only after it
        self._rollbacks.report_last()
        return checkpoint.step

    def _launch(self, step: int, data: StepData) -> InFlightStep:
        """Launches a step; the clock of the steps pauses after one that must be finished before the next starts."""
        train = self.config.train
        rate = learning_rate(self.config.optimizer, self.config.schedule, step - 1, train.steps)
        self._heartbeat.step = step
        own_time = OwnTime(self._heartbeat.wait_seconds)
        self.engine.timer.start()
        with naming_samples(step, self._describe_samples):
            pending = self.engine.step(data.batches, learning_rate=rate, step=step)
        comparison = self._replicas.start(self.engine.replicas(), step) if self._due.comparison(step) else None
        self.engine.timer.leave()
        if self.mesh.device.type in SYNCHRONOUS_DEVICES:
            self._own_seconds = own_time.seconds(self._heartbeat.wait_seconds)
        self._watch_own_times(step, data)
        if self._due.has_any(step):
            self.engine.timer.pause()  # evaluations and checkpoints count for no step
            self.mesh.launch_order.compare()  # else this rank may wait forever, or save wrong weights
        slowest, batch = self._stragglers.slowest, self.data.skipped.batch(step)
        return InFlightStep(
            step, pending, rate, data.wait_seconds, data.wait_rank, slowest, data.digest, comparison, batch
        )

    def _watch_own_times(self, step: int, data: StepData) -> None:
        """Warns of a slow rank, by the ranks' own times: on CPUs in the launch of the step before, on GPUs in the step
        finished last, where the engine measures them. The stages of a pipeline differ, and the first step compiles."""
        comparable = step > self.resumed_step + 2 and self.mesh.pp.size == 1 and all(data.own_seconds)
        named = comparable and self._stragglers.add(data.own_seconds, each=self.engine.timer.measures_every_wait)
        if named and self.mesh.is_first_rank:
            _log.warning("step %d: %s", step, named)

    def _warn_of_spike(self, finished: FinishedStep, spike: SpikeReading) -> None:
        """Warns of a step whose loss or norm is a spike, with its samples."""
        if self.mesh.is_first_rank:
            found = spike.describe(finished.result.loss, finished.result.grad_norm)
            samples = self._describe_samples(finished.step)
            _log.warning("step %d: %s. Its samples, by data-parallel rank: %s", finished.step, found, samples)

    def _describe_samples(self, step: int) -> str:
        return describe_samples(self.config, self.data, self.mesh, self.data.skipped.batch(step))

    def _evaluate_if_due(self, step: int) -> AnyEvaluation | None:
        """Evaluates the first samples of the validation split where an evaluation is due."""
        train = self.config.train
        if self.validation is None or not self._due.evaluation(step):
            return None
        self.engine.before_evaluation()
        batches = train.evaluate_batches
        loader = ValidationLoader(
            self.validation,
            micro_batch_size=train.micro_batch_size,
            dp_rank=self.mesh.samples.rank,
            dp_size=self.mesh.samples.size,
            max_samples=_EVALUATED_SAMPLES if batches is None else batches * train.global_batch_size,
        )
        with self._heartbeat.in_phase("evaluation"):
            return evaluate(self.model, loader, self.mesh, token_bytes=self.token_bytes)

    def _run_tasks_if_due(self, step: int) -> dict[str, float]:
        """Results of the tasks where they are due, else none."""
        if self.tasks is None or not self._due.tasks(step):
            return {}
        self.engine.before_evaluation()
        with self._heartbeat.in_phase("tasks"):
            return self.tasks.run(self.model, self.mesh, step=step)

    def _stop_early(self, stop: DataFailure | Preemption, step: int, log: RunLog) -> NoReturn:
        """Ends the run after `step` finished steps; after a signal they are saved first."""
        if isinstance(stop, DataFailure):
            stop.raise_error()
        if step > self.resumed_step and not self._due.save(step):
            if (comparison := self._replicas.start(self.engine.replicas(), step)) is not None:
                comparison.wait()
            self._saves.save(step, self.data, log, wait=True)
        else:
            with self._heartbeat.in_phase("save"):
                self._saves.finish(log)
        raise PreemptedError(
            f"{stop.signal} after {step} of {self.config.train.steps} steps, all of them saved in "
            f"{self.run.checkpoints}; run the same command to continue"
        )

    def _report_lines(self) -> list[str]:
        """Lines on the run, the data, the stages of a pipeline and initial weights, printed above the first step."""
        plan = self.model.plan.report_lines() if isinstance(self.model, Pipeline) else []
        stages = [f"pipeline {line}" for line in plan]
        initial = [] if self.initial_weights is None else self.initial_weights.report_lines()
        if (trunk := self.config.train.branch_from) is not None:
            initial.append(f"branch of {trunk}: goes on after {self.resumed_step} steps")
        if self.data.skipped.windows:
            initial.append(f"batches of the sample order that the run leaves out: {self.data.skipped}")
        facts = start_lines(self.config, self.mesh, self.data, resumed_step=self.resumed_step)
        return [
            *self._resumption.report_lines(),
            *facts,
            self.shards.line,
            *self.data.report_lines(),
            *stages,
            *initial,
        ]

    def _write_loss_curve(self, evaluation: AnyEvaluation | None) -> None:
        if self.mesh.is_first_rank and self.run.metrics.stat().st_size:
            # An encoder's loss has a second term, which the unigram entropy does not bound.
            entropy = evaluation.unigram_entropy if isinstance(evaluation, Evaluation) else None
            try:
                write_loss_curve(self.run.metrics, self.run.loss_curve, unigram_entropy=entropy)
            except StorageError as error:
                _log.warning("no loss curve: %s; the run itself is complete", error)


def train(
    config: RunConfig,
    device: torch.device,
    path: Path,
    *,
    hooks: Sequence[UpdateHook] = (),
    tasks: TaskRunner | None = None,
) -> TrainResult:
    """Trains `config` in the run folder `path`, resuming from its newest checkpoint; needs a process group.

    Args:
        hooks: the same on every rank, called after each update of the weights; see `UpdateHook`.
        tasks: evaluates `evaluation.tasks`.

    Raises:
        ConfigError: ranks with different configs, code or libraries, or tasks that cannot be evaluated, on every rank.
        MegalinError: as `RunFolder` and `TrainingLoop` do, on every rank.
    """
    check_same_start(config)  # before the mesh: with different axes, ranks would wait in different groups
    check_tasks(config, tasks)
    mesh = Mesh(config.parallel, device)
    saver = BackgroundSaver(config.train.phase_timeout_seconds) if config.checkpoint.background else None
    # Failed ranks are reported inside the event log, so that its error names them.
    with (
        RunFolder(path) as run,
        EventLog(run.incidents) as event_log,
        watched(config, run, event_log) as watchdog,
        nullcontext() if saver is None else saver.completing(),
        report_failed_ranks(default_rendezvous(), find_verdict=no_verdict if watchdog is None else watchdog.verdict),
        report_host_memory(),
    ):
        if run.previous_owner is not None:
            event_log.write("taken over", f"from {run.previous_owner}, which ended without closing the folder")
        loop = TrainingLoop(config, mesh, run, event_log, hooks, tasks, watchdog, saver)
        with closing(loop.engine):
            return loop.train()
