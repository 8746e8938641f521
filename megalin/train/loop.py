"""The training loop: resume, step, measure, evaluate, save."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from megalin.checkpoint.load import newest
from megalin.checkpoint.save import save
from megalin.config import dumps
from megalin.data.batch import AnyBatch, batch_to, pinned, split_tokens
from megalin.data.loader import Loader, StepBatches, ValidationLoader
from megalin.data.sources import Dataset, open_dataset, open_training
from megalin.data.tokenizers.tokenizer import load_tokenizer
from megalin.errors import CheckpointError, ConfigError, MegalinError, PreemptedError
from megalin.ops.dispatch import backend
from megalin.optim.schedule import learning_rate
from megalin.parallel.agreement import on_every_rank, sum_over_ranks
from megalin.parallel.collectives import gather_objects
from megalin.parallel.mesh import Mesh
from megalin.parallel.rank_failures import default_rendezvous, report_failed_ranks
from megalin.train.config import RunConfig
from megalin.train.curves import write_loss_curve
from megalin.train.engine import Engine, FullyShardedEngine
from megalin.train.environment import device_name, environment, versions
from megalin.train.events import EventLog
from megalin.train.garbage_collection import without_long_collections
from megalin.train.hardware import peak_flops_per_second, peak_memory_bytes
from megalin.train.in_flight import InFlightStep, InFlightSteps
from megalin.train.ledger import Ledger
from megalin.train.metrics import Metrics
from megalin.train.open_run import check_same_model
from megalin.train.pipeline_model import Pipeline
from megalin.train.preemption import PreemptionHandler
from megalin.train.run_folder import RunFolder
from megalin.train.step import StepResult
from megalin.train.validation import AnyEvaluation, Evaluation, evaluate


class TrainResult(NamedTuple):
    """Outcome of a run."""

    step: int
    """Finished steps."""
    loss: float | None
    """Loss of the last step, nats a token; None if no step was left."""
    evaluation: AnyEvaluation | None
    """Evaluation of the validation split after the last step; None without one."""


class TrainingLoop:
    """One run on this rank's mesh, from its first step or from the newest checkpoint of its folder.

    Every rank creates one, inside an initialised process group.
    """

    def __init__(self, config: RunConfig, mesh: Mesh, run: RunFolder, event_log: EventLog) -> None:
        """Opens the data, builds the model, and loads the newest checkpoint if there is one.

        Raises:
            ConfigError: a checkpoint with a different sample order.
            DataError: on every rank, when shards or a tokenizer are bad or missing on any rank.
            CheckpointError: a checkpoint of a different model, or none that verifies.
        """
        self.config, self.mesh, self.run, self.event_log = config, mesh, run, event_log
        on_every_rank(self._open_data)  # hosts may have different disks
        self.engine = _make_engine(config, mesh, run)
        self.model = self.engine.model
        self.first_step = self._resume()
        self.preemption = PreemptionHandler()
        self._evaluation: AnyEvaluation | None = None

    def _open_data(self) -> None:
        config, vocab_size, seed = self.config, self.config.model.vocab_size, self.config.train.seed
        self.data = open_training(
            config.data,
            vocab_size,
            seed=seed,
            steps=config.train.steps,
            global_batch_size=config.train.global_batch_size,
            folder=self.run.path,
        )
        self.validation: Dataset[Any] | None = None
        if config.data.has("validation"):
            self.validation = open_dataset(config.data, "validation", vocab_size, seed)
        tokenizer = None if config.data.tokenizer is None else load_tokenizer(config.data.tokenizer)
        self.token_bytes = None if tokenizer is None else torch.from_numpy(tokenizer.token_bytes())

    def _resume(self) -> int:
        """Loads the newest checkpoint; returns the number of finished steps."""
        checkpoint = newest(self.run.checkpoints)
        if checkpoint is None:
            return 0
        state = checkpoint.state()
        if state["order"] is None:  # imported weights: no step of this run is done
            check_same_model(self.config.model, checkpoint)
            self.engine.load(checkpoint, weights_only=True)
            return 0
        differences = [
            f"{name}: {state['order'].get(name)!r} in the checkpoint, {value!r} in the config"
            for name, value in self._order(int(state["step"])).items()
            if state["order"].get(name) != value
        ]
        if differences:
            raise ConfigError(
                f"{checkpoint.path} was made with a different order of samples, so samples would be lost or repeated; "
                "restore these values or start in a new run folder:\n  " + "\n  ".join(differences)
            )
        check_same_model(self.config.model, checkpoint)
        self.engine.load(checkpoint)
        step = int(state["step"])
        if step > self.config.train.steps:
            raise CheckpointError(
                f"{checkpoint.path} holds {step} finished steps, train.steps is {self.config.train.steps}; "
                "raise train.steps or start in a new run folder"
            )
        return step

    def train(self) -> TrainResult:
        """Runs the remaining steps, saving as configured and after the last one.

        Raises:
            NumericError: a loss or gradient that is not finite; nothing is saved.
            DataError: on every rank, for a token id beyond the vocabulary or an unreadable shard on any rank.
            PreemptedError: on every rank, after SIGTERM on any rank; the current step is finished and saved first.
        """
        config, train = self.config, self.config.train
        last_step = train.stop_after_steps or train.steps
        metrics = Metrics(
            self.run.path,
            total_steps=train.steps,
            resumed_step=self.first_step,
            log_interval=train.log_every_steps,
            event_log=self.event_log,
            wandb_project=config.logging.wandb_project,
            wandb_config=config.model_dump(mode="json"),
        )
        for line in self.data.report_lines():
            metrics.print_line(line)
        if isinstance(self.model, Pipeline):
            for line in self.model.plan.report_lines():
                metrics.print_line(f"pipeline {line}")
        with (
            self._loader() as loader,
            metrics,
            closing(self._ledger()) as ledger,
            self.preemption,
            without_long_collections() as freeze,
        ):
            in_flight = InFlightSteps(partial(self._finish_step, metrics, ledger, last_step))
            for step in range(self.first_step, last_step):
                batches, digest, data_wait_seconds = self._next_batches(loader, step, in_flight.finish)
                rate = learning_rate(config.optimizer, config.schedule, step, train.steps)
                self.mesh.launches.step = step + 1
                pending = self.engine.step(batches, learning_rate=rate, step=step + 1)
                must_finish = self._must_finish(step + 1, last_step)
                if must_finish:
                    self.engine.timer.pause()  # evaluations and checkpoints count for no step
                    self.mesh.launch_order.compare()  # else this rank may wait forever, or save wrong weights
                in_flight.finish()
                in_flight.add(InFlightStep(step + 1, pending, rate, data_wait_seconds, digest))
                if pending.is_ready or must_finish:
                    in_flight.finish()
                if step == self.first_step:
                    freeze()
        if self.mesh.is_first_rank and self.run.metrics.stat().st_size:
            # An encoder's loss has a second term, which the unigram entropy does not bound.
            entropy = self._evaluation.unigram_entropy if isinstance(self._evaluation, Evaluation) else None
            write_loss_curve(self.run.metrics, self.run.loss_curve, unigram_entropy=entropy)
        loss = None if in_flight.result is None else in_flight.result.loss
        return TrainResult(max(last_step, self.first_step), loss, self._evaluation)

    def _must_finish(self, step: int, last_step: int) -> bool:
        """Whether this step must be finished before the next one starts: it is logged first or last, evaluated or
        checkpointed."""
        return step in (self.first_step + 1, last_step) or self._is_save_due(step) or self._is_evaluation_due(step)

    def _finish_step(
        self, metrics: Metrics, ledger: Ledger, last_step: int, finished: InFlightStep, result: StepResult
    ) -> None:
        """Records a step, evaluates and saves as configured."""
        step = finished.step
        if step == self.first_step + 1:
            self._log_kernels(metrics)
        values = self._measure(finished, result)
        self._evaluation = self._evaluate_after(step, last_step)
        evaluation_values = {} if self._evaluation is None else self._evaluation.metrics()
        metrics.write(step, values | evaluation_values)
        ledger.write(step, finished.digest)
        if step == last_step or self._is_save_due(step):
            self._save(step)

    def _log_kernels(self, metrics: Metrics) -> None:
        """Logs the implementation of each op and the reason for it, once per process after its first step."""
        used = dict(item for each in gather_objects(backend.used(), self.mesh.pp.group) for item in each.items())
        metrics.print_line("kernels: " + ", ".join(f"{op} {choice.backend}" for op, choice in used.items()))
        self.run.write_json(self.run.kernels, {op: choice._asdict() for op, choice in used.items()})

    def _loader(self) -> Loader[Any]:
        train, mesh, data = self.config.train, self.mesh, self.config.data

        def prepare(batch: AnyBatch) -> AnyBatch:
            batch = split_tokens(batch, mesh.cp)
            return pinned(batch) if mesh.device.type == "cuda" else batch

        return Loader(
            self.data.dataset,
            self.data.order,
            global_batch_size=train.global_batch_size,
            micro_batch_size=train.micro_batch_size,
            dp_rank=mesh.samples.rank,
            dp_size=mesh.samples.size,
            workers=data.workers,
            read_ahead_steps=data.read_ahead_steps,
            prepare=prepare,
        )

    def _ledger(self) -> Ledger:
        return Ledger(self.run.ledger, resumed_step=self.first_step)

    def _next_batches(
        self, loader: Loader[Any], step: int, finish: Callable[[], None]
    ) -> tuple[list[AnyBatch], Tensor, float]:
        """This rank's micro-batches on its device, the digest [2] of the step's token ids over all ranks, and the
        seconds that this rank waited for its data (not for the device, which may still run the previous step).

        A data error or a SIGTERM of one rank is raised on all ranks, after `finish` has finished the in-flight step.
        """
        mesh = self.mesh
        own = StepBatches[Any]([], torch.zeros(2, dtype=torch.int64))
        error: MegalinError | None = None
        started = time.perf_counter()
        try:
            own = loader.step(step)
        except MegalinError as raised:
            error = raised
        waited = time.perf_counter() - started
        # Over all axes: ranks of other layers or shards read the same samples, each from its own disk. Only one of the
        # ranks that share samples counts in the digest.
        counts = int(max(mesh.tp.axis.rank, mesh.cp.axis.rank, mesh.pp.axis.rank) == 0)
        flags = torch.tensor([error is not None, self.preemption.received, mesh.launch_order.residual()]).long()
        failed, terminated, residual, *digest = sum_over_ranks(torch.cat([flags, counts * own.digest])).tolist()
        if residual:  # before anything waits for the device, which such launches can stop
            on_every_rank(mesh.launch_order.compare)
        if failed or terminated:
            finish()
        if failed:
            on_every_rank(lambda: _raise(error))
        if terminated:
            self._leave(step)
        return [batch_to(batch, mesh.device) for batch in own.batches], torch.tensor(digest), waited

    def _measure(self, finished: InFlightStep, result: StepResult) -> dict[str, float | int]:
        train, length = self.config.train, self.config.data.sequence_length
        tokens = train.global_batch_size * length
        values: dict[str, float | int] = {
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "learning_rate": finished.learning_rate,
            "tokens": finished.step * tokens,
            "label_tokens": result.label_tokens,
            "tokens_per_second": tokens / result.seconds,
            "step_seconds": result.seconds,
            "data_wait_seconds": finished.data_wait_seconds,
            "peak_memory_bytes": peak_memory_bytes(self.mesh.device),
        }
        if len(result.terms) > 1:
            values |= {f"{name}_loss": term for name, term in zip(self.model.loss_names, result.terms, strict=True)}
        peak = peak_flops_per_second(self.mesh.device)
        if peak is not None:
            flops = self.model.training_flops(length) * tokens / result.seconds
            values["model_flops_utilization"] = flops / (peak * torch.distributed.get_world_size())
        return values

    def _evaluate_after(self, step: int, last_step: int) -> AnyEvaluation | None:
        train = self.config.train
        if step == last_step:
            return self.evaluate()
        if not self._is_evaluation_due(step):
            return None
        batches = train.evaluate_batches
        return self.evaluate(max_samples=None if batches is None else batches * train.global_batch_size)

    def _is_evaluation_due(self, step: int) -> bool:
        every_steps = self.config.train.evaluate_every_steps
        return self.validation is not None and every_steps is not None and step % every_steps == 0

    def evaluate(self, *, max_samples: int | None = None) -> AnyEvaluation | None:
        """Evaluates the validation split, or its first samples; returns None without a validation split."""
        if self.validation is None:
            return None
        loader = ValidationLoader(
            self.validation,
            micro_batch_size=self.config.train.micro_batch_size,
            dp_rank=self.mesh.samples.rank,
            dp_size=self.mesh.samples.size,
            max_samples=max_samples,
        )
        return evaluate(self.model, loader, self.mesh, token_bytes=self.token_bytes)

    def _leave(self, step: int) -> NoReturn:
        """Ends the run after `step` finished steps; saves them first."""
        if step > self.first_step and not self._is_save_due(step):
            self._save(step)
        raise PreemptedError(
            f"SIGTERM after {step} of {self.config.train.steps} steps, all of them saved in {self.run.checkpoints}; "
            "run the same command to continue"
        )

    def _is_save_due(self, step: int) -> bool:
        every_steps = self.config.checkpoint.every_steps
        return every_steps is not None and step % every_steps == 0

    def _save(self, step: int) -> None:
        state = {
            "step": step,
            "order": self._order(step),
            "config": self.config.model_dump(mode="json"),
            "versions": versions(),
        }
        keep_latest = self.config.checkpoint.keep_latest
        save(self.run.checkpoints, step=step, tensors=self.engine.tensors(), state=state, keep_latest=keep_latest)

    def _order(self, step: int) -> dict[str, Any]:
        """Everything that determines the samples of the first `step` steps; equal values give the same on any mesh."""
        config = self.config
        masking = config.data.masking
        return {
            "data.masking": None if masking is None else masking.model_dump(mode="json"),
            "train.seed": config.train.seed,
            "train.global_batch_size": config.train.global_batch_size,
            "data.sequence_length": config.data.sequence_length,
            "data.isolate_documents": config.data.isolate_documents,
            "data.packing": config.data.packing,
            "data.order": config.data.order,
            **self.data.identity(step),
        }


def train(config: RunConfig, device: torch.device, path: Path) -> TrainResult:
    """Trains `config` in the run folder `path`, resuming from its newest checkpoint; needs a process group.

    Raises:
        ConfigError: ranks with different configs, on every rank.
        MegalinError: as `RunFolder` and `TrainingLoop` do, on every rank.
    """
    _check_same_config(config)  # before the mesh: with different axes, ranks would wait in different groups
    mesh = Mesh(config.parallel, device)
    # Failed ranks are reported inside the event log, so that its error names them.
    with RunFolder(path) as run, EventLog(run.incidents) as event_log, report_failed_ranks(default_rendezvous()):
        if run.previous_owner is not None:
            event_log.write("taken over", f"from {run.previous_owner}, which ended without closing the folder")
        loop = TrainingLoop(config, mesh, run, event_log)
        run.write_text(run.config, dumps(config))
        run.write_json(run.environment, environment(mesh))
        event_log.begin(loop.first_step, f"on {torch.distributed.get_world_size()} x {device_name(device)}")
        with closing(loop.engine):
            return loop.train()


def _make_engine(config: RunConfig, mesh: Mesh, run: RunFolder) -> Engine:
    if config.train.engine == "fsdp2":
        return FullyShardedEngine(config, mesh)
    from megalin.train.deepspeed_engine import DeepSpeedEngine  # imports a library that other runs do not need

    engine = DeepSpeedEngine(config, mesh)
    run.write_json(run.deepspeed, engine.settings)
    return engine


def _check_same_config(config: RunConfig) -> None:
    texts = on_every_rank(lambda: dumps(config))
    for rank, text in enumerate(texts):
        if text != texts[0]:
            pairs = zip(texts[0].splitlines(), text.splitlines(), strict=False)
            line = next(((a, b) for a, b in pairs if a != b), ("", "a different number of lines"))
            raise ConfigError(
                f"rank {rank} has a different config than rank 0: {line[1]!r} against {line[0]!r}; "
                "give every rank the same file and overrides"
            )


def _raise(error: MegalinError | None) -> None:
    if error is not None:
        raise error
