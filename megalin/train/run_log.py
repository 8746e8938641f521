"""Log of a run: a line of metrics and of the ledger for each step, and the kernels of its ops."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial

import torch.distributed as dist

from megalin.checkpoint.background import FinishedSave
from megalin.errors import StorageError
from megalin.ops.dispatch import backend
from megalin.parallel.agreement import on_every_rank
from megalin.parallel.mesh import Mesh
from megalin.train.build import TrainedModel
from megalin.train.config import RunConfig
from megalin.train.data_wait import DataWaitMonitor
from megalin.train.events import EventLog
from megalin.train.hardware import peak_flops_per_second, peak_memory_bytes
from megalin.train.in_flight import FinishedStep
from megalin.train.ledger import Ledger
from megalin.train.metrics import Metrics
from megalin.train.prometheus import Prometheus
from megalin.train.run_folder import RunFolder
from megalin.train.slow_saves import SaveMonitor
from megalin.train.start_lines import mixer_types
from megalin.train.tasks import task_lines, task_metrics
from megalin.train.validation import AnyEvaluation

_log = logging.getLogger(__name__)


class RunLog:
    """Metrics, ledger and kernels of a run. Every rank has one; rank 0 writes."""

    def __init__(
        self, config: RunConfig, mesh: Mesh, run: RunFolder, model: TrainedModel, metrics: Metrics, ledger: Ledger
    ) -> None:
        self._config, self._mesh, self._run, self._loss_names = config, mesh, run, model.loss_names
        self._metrics, self._ledger = metrics, ledger
        self._seconds: dict[str, float] = {}
        self._data_wait, self._saves = DataWaitMonitor(), SaveMonitor(in_background=config.checkpoint.background)
        self._flops_per_token = model.training_flops(config.data.sequence_length)

    def print_line(self, line: str) -> None:
        """Prints a line above the progress."""
        self._metrics.print_line(line)

    def print_lines(self, lines: Sequence[str]) -> None:
        """Prints lines above the progress."""
        for line in lines:
            self.print_line(line)

    def write_kernels(self) -> None:
        """Logs the implementation of each op so far and the reason for it, and a warning if ranks chose different ones;
        a collective."""
        used: dict[str, backend.Choice] = {}
        for rank, choices in enumerate(on_every_rank(backend.used, dict[str, backend.Choice])):
            for op, own in choices.items():
                choice = used.setdefault(op, own)
                if choice.backend != own.backend and dist.get_rank() == 0:
                    _log.warning(
                        "%s: rank %d uses %s (%s), lower ranks %s (%s); their rounding and speed may differ",
                        op,
                        rank,
                        *own,
                        *choice,
                    )
        self.print_line("kernels: " + ", ".join(f"{op} {choice.backend}" for op, choice in used.items()))
        try:
            self._run.write_json(self._run.kernels, {op: choice._asdict() for op, choice in used.items()})
        except StorageError as error:  # raised on rank 0 alone; training does not depend on it
            _log.warning("%s", error)

    def write(self, finished: FinishedStep, evaluation: AnyEvaluation | None, tasks: dict[str, float]) -> None:
        """Logs a step, the evaluation after it, if there is one, and the results of tasks, if there are some."""
        values = step_metrics(finished, self._config, self._mesh, self._loss_names, self._flops_per_token)
        values |= ({} if evaluation is None else evaluation.metrics()) | task_metrics(tasks)
        self._metrics.write(finished.step, values | self._seconds)
        self._seconds = {}
        waited = self._data_wait.add(
            wait_seconds=finished.launched.data_wait_seconds,
            rank=finished.launched.data_wait_rank,
            step_seconds=finished.result.seconds,
        )
        if waited and dist.get_rank() == 0:
            _log.warning("step %d: %s", finished.step, waited)
        if (scaling := finished.result.scaling) is not None and scaling.skipped:
            self.print_line(
                f"step {finished.step}  no update: the gradient overflows with the loss scale {scaling.scale:,.0f}"
            )
        for line in task_lines(tasks):
            self.print_line(f"step {finished.step}  {line}")
        launched, skipped = finished.launched, finished.result.skipped
        self._ledger.write(finished.step, launched.digest, skipped=skipped, batch=launched.batch)

    def rewind(self, step: int) -> None:
        """Removes the lines of later steps, which are undone; a collective. Raises StorageError on every rank."""
        self._metrics.rewind(step)
        self._ledger.rewind(step)

    @contextmanager
    def timed(self, name: str, due: bool = True) -> Iterator[None]:
        """Adds the seconds of the body, if it is due, to the next line of metrics."""
        started = time.perf_counter()
        yield
        if due:
            self._seconds[name] = time.perf_counter() - started

    @contextmanager
    def timed_save(self, step: int) -> Iterator[None]:
        """Adds the seconds of the body, a save, to the next line of metrics, and warns of slow ones."""
        started = time.perf_counter()
        with self.timed("save_seconds"):
            yield
        slow = self._saves.add(started=started, ended=time.perf_counter())
        if slow and dist.get_rank() == 0:
            _log.warning("step %d: %s", step, slow)

    def add_written(self, written: FinishedSave) -> None:
        """Adds the seconds in which a checkpoint was written in the background to the next line of metrics."""
        self._seconds["save_write_seconds"] = written.write_seconds

    def write_rest(self) -> None:
        """Prints the seconds that no line of metrics took any more: those of the last checkpoint."""
        for name, seconds in self._seconds.items():
            self.print_line(f"{name.removesuffix('_seconds')} after the last step: {seconds:.2f} s")

    def sync(self) -> None:
        """Flushes the ledger to the disk, before a checkpoint."""
        self._ledger.sync()


@contextmanager
def open_run_log(
    config: RunConfig, mesh: Mesh, run: RunFolder, model: TrainedModel, event_log: EventLog, *, resumed_step: int
) -> Iterator[RunLog]:
    """Opens the files of the log, without the lines of steps after `resumed_step`, and closes them at the end.

    Raises:
        StorageError, ConfigError, DataError: as `Metrics` and `Ledger` do, on every rank.
    """
    logging, types = config.logging, mixer_types(config.model)
    prometheus = partial(Prometheus, run.path, logging, total_steps=config.train.steps, model="-".join(types))
    metrics = Metrics(
        run.path,
        total_steps=config.train.steps,
        resumed_step=resumed_step,
        log_interval=config.train.log_every_steps,
        event_log=event_log,
        wandb_project=logging.wandb_project,
        wandb_config=config.model_dump(mode="json"),
        prometheus=prometheus if logging.prometheus_file or logging.prometheus_port is not None else None,
    )
    is_branch = config.train.branch_from is not None
    with metrics, closing(Ledger(run.ledger, resumed_step=resumed_step, is_branch=is_branch)) as ledger:
        yield RunLog(config, mesh, run, model, metrics, ledger)


def step_metrics(
    finished: FinishedStep, config: RunConfig, mesh: Mesh, loss_names: Sequence[str], flops_per_token: int
) -> dict[str, float | int]:
    """Metrics of a step, by name with their units; `tokens` and `flops` are those of the run so far.

    Args:
        loss_names: the terms of the loss.
        flops_per_token: of forward and backward.
    """
    launched, result = finished
    tokens = config.train.global_batch_size * config.data.sequence_length
    values: dict[str, float | int] = {
        "loss": result.loss,
        "grad_norm": result.grad_norm,
        "learning_rate": launched.learning_rate,
        "tokens": launched.step * tokens,
        "flops": launched.step * tokens * flops_per_token,
        "label_tokens": result.label_tokens,
        "tokens_per_second": tokens / result.seconds,
        "step_seconds": result.seconds,
        "data_wait_seconds": launched.data_wait_seconds,
        "data_wait_rank": launched.data_wait_rank,
        "peak_memory_bytes": peak_memory_bytes(mesh.device),
    }
    if len(result.terms) > 1:
        values |= {f"{name}_loss": term for name, term in zip(loss_names, result.terms, strict=True)}
    if result.scaling is not None:
        values |= {"loss_scale": result.scaling.scale, "skipped": int(result.skipped)}
    if result.spike is not None and result.spike.found:
        values |= {"spike": 1, "skipped": int(result.skipped)}
    if launched.slowest is not None:
        values |= {"slowest_rank": launched.slowest.rank, "slowest_rank_ratio": launched.slowest.ratio}
    peak = peak_flops_per_second(mesh.device)
    if peak is not None:
        rate = flops_per_token * tokens / result.seconds
        values["model_flops_utilization"] = rate / (peak * dist.get_world_size())
    return values
