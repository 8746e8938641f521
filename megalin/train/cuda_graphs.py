"""CUDA graph of a step's forwards and backwards: captured once, then launched by a single call."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from megalin.data.batch import AnyBatch, map_fields
from megalin.errors import ConfigError
from megalin.model.build import Model
from megalin.parallel.agreement import on_every_rank, world_size
from megalin.parallel.compute_waits import ComputeWaits
from megalin.parallel.data_parallel import ordered_cuda_streams
from megalin.parallel.heartbeats import current
from megalin.parallel.mesh import Mesh
from megalin.parallel.step_record import StepRecord
from megalin.parallel.weight_copies import refresh_weight_copies
from megalin.train.graph_choice import (
    StepMemory,
    allocator_obstacle,
    chosen_line,
    growth_obstacle,
    leaves_no_evaluation,
    memory_obstacle,
    recaptures_obstacle,
    refused_line,
    waits_obstacle,
)
from megalin.train.graph_documents import GraphDocuments
from megalin.train.step import accumulate_gradients

WARM_UP_STEPS = 3
"""Eager steps before the capture: they compile, choose kernels and open communicators, which a capture cannot."""
_WAITS = "called a synchronizing CUDA operation"
"""Start of torch's warning of an op for which the host waits."""


class GradientGraph:
    """`accumulate_gradients` of one model, for steps that take the host longer to launch than the device to run.

    After the eager steps it captures one, and from then on replays it: the same kernels on the same CUDA streams,
    collectives included, so the same bits. The graph's outputs, activations and gradients, keep their memory between
    steps; the weights that it reads must keep theirs.

    With attention that `reads_documents` a graph is valid within bounds of a step's documents (`GraphDocuments`). A
    step outside of them drops it and runs eagerly, and the next step within the new ones is captured again.

    Where it is `automatic`, it stays eager if the host of a rank waits for its device in a step, or if a rank's graph
    would take too much memory, and drops graphs before evaluations if a rank has little memory left
    (docs/adr/0021-automatic-cuda-graphs.md); `report_lines` has the reason. All ranks decide the same.

    On several ranks the graph contains marks of its collectives (`StepRecord`), from which the watchdog of this rank
    finds the one in which its device waits.

    Raises:
        ConfigError: no GPU, or settings under which a captured collective reads unmapped memory.
    """

    def __init__(
        self,
        model: Model,
        mesh: Mesh,
        loss_scale: Tensor | None = None,
        *,
        automatic: bool = False,
        reads_documents: bool = False,
    ) -> None:
        """`loss_scale` [] keeps its memory, as the weights do. `reads_documents`: a mixer reads the offsets of
        documents (`MixerConfig.host_reads_documents`)."""
        if mesh.device.type != "cuda":
            raise ConfigError(
                f"train.cuda_graphs = true, but this run computes on a {mesh.device.type} device, which has no "
                "CUDA graphs; set it to false"
            )
        if (obstacle := allocator_obstacle(os.environ)) is not None:
            raise ConfigError(f"train.cuda_graphs = true with {obstacle.cause}; set {obstacle.remedy}")
        self._model, self._mesh, self._loss_scale = model, mesh, loss_scale
        self.cuda_stream = torch.cuda.Stream(mesh.device)
        """The CUDA stream on which eager steps run before the capture, and which is captured."""
        self.waits: ComputeWaits | None = None
        """Measures the compute stream's waits for other ranks; set before the capture."""
        self._step_record: StepRecord | None = None
        self._graph: torch.cuda.CUDAGraph | None = None
        self._eager_steps = 0
        self._automatic, self._refused, self._is_chosen = automatic, False, not automatic
        self._is_dropped_for_evaluations = False
        self._documents = GraphDocuments() if reads_documents else None
        self._replays, self._drops = 0, 0
        self._waits: list[str] = []
        self._reserved = 0
        self._lines: list[str] = []

    @property
    def is_captured(self) -> bool:
        """Whether steps are replays from here on."""
        return self._graph is not None

    def report_lines(self) -> list[str]:
        """Lines on the choice, once after it was made."""
        lines, self._lines = self._lines, []
        return lines

    def accumulate_gradients(self, batches: Sequence[AnyBatch]) -> tuple[Tensor, Tensor]:
        """`accumulate_gradients` of micro-batches, with the same number and shapes at each call.

        The parameters have no gradients before the call. The gradients and the result are valid until the next call.

        Raises:
            ConfigError: the capture of an automatic graph failed.
        """
        is_within = self._documents is None or self._refused or self._documents.admit(batches)
        if self._eager_steps < WARM_UP_STEPS:
            self._eager_steps += 1
            return self._run_eagerly(batches, is_measured=self._automatic and self._eager_steps == WARM_UP_STEPS)
        if not is_within:
            self._drop_for_documents()
            return self._run_eagerly(batches)
        refresh_weight_copies(self._model)  # neither captured nor checked by the graph
        if self._graph is None and not self._refused:
            if self._is_chosen:
                self._graph = self._record(batches)
            else:
                self._choose(batches)
        if self._graph is None:
            return accumulate_gradients(self._model, batches, self._mesh, self._loss_scale)
        shapes = [_shapes(batch) for batch in batches]
        assert shapes == [_shapes(batch) for batch in self._batches], shapes
        for recorded, batch in zip(self._batches, batches, strict=True):
            map_fields(Tensor.copy_, recorded, batch)
        self._graph.replay()
        self._replays += 1
        if self.waits is not None and self._step_record is not None:
            self.waits.add_replay(self._step_record.waited())
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        return self._result

    def before_evaluation(self) -> None:
        """Drops an automatic graph that leaves too little memory for an evaluation; the next step captures it again."""
        if self._graph is not None and self._is_dropped_for_evaluations:
            self._drop()

    def close(self) -> None:
        """Frees the graph; a process group whose collectives it contains would wait for it at shutdown."""
        if self._graph is not None:
            self._graph.reset()
            self._graph = None

    def _run_eagerly(self, batches: Sequence[AnyBatch], *, is_measured: bool = False) -> tuple[Tensor, Tensor]:
        """Runs eagerly on the CUDA stream of the capture, so that autograd nodes record no other stream. A measured
        step starts without cached memory, to reserve what a step takes."""
        if is_measured:
            torch.cuda.empty_cache()
        outside = torch.cuda.current_stream()
        self.cuda_stream.wait_stream(outside)
        with torch.cuda.stream(self.cuda_stream), recorded_waits(self._waits) if is_measured else nullcontext():
            result = accumulate_gradients(self._model, batches, self._mesh, self._loss_scale)
        outside.wait_stream(self.cuda_stream)
        if is_measured:
            self._reserved = torch.cuda.memory_reserved(self._mesh.device)
        return result

    def _choose(self, batches: Sequence[AnyBatch]) -> None:
        """Captures a graph, unless a step does not allow it, and drops one that takes too much memory."""
        device, eager = self._mesh.device, self._reserved
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        memory = StepMemory(eager, torch.cuda.memory_reserved(device), torch.cuda.mem_get_info(device)[0])
        obstacle = first_obstacle(waits_obstacle(self._waits) or memory_obstacle(memory))
        if obstacle is None:
            try:
                self._graph = self._record(batches)
            except RuntimeError as error:
                cause = error.__context__ or error
                raise ConfigError(
                    f'train.cuda_graphs = "auto": a step cannot be captured in a CUDA graph ({cause}); set it to false'
                ) from error
            captured = torch.cuda.memory_reserved(device)
            obstacle = first_obstacle(growth_obstacle(eager, captured))
        if obstacle is None:
            self._is_chosen = True
            self._is_dropped_for_evaluations = any(on_every_rank(lambda: leaves_no_evaluation(memory)))
            self._lines.append(chosen_line(eager, captured, is_dropped=self._is_dropped_for_evaluations))
        else:
            self._refused = True
            self._drop()
            self._lines.append(refused_line(obstacle))

    def _drop_for_documents(self) -> None:
        """Drops the graph before a step for which it is not valid; where that happens too often, for the whole run."""
        if self._graph is None:
            return
        self._drops += 1
        self._drop()
        obstacle = recaptures_obstacle(drops=self._drops, replays=self._replays) if self._automatic else None
        if obstacle is not None:
            self._refused = True
            self._lines.append(refused_line(obstacle))

    def _drop(self) -> None:
        """Frees the graph and its memory, after its last replay."""
        if self._graph is None:
            return
        torch.cuda.synchronize(self._mesh.device)
        self.close()
        for parameter, _ in self._gradients:
            parameter.grad = None
        del self._batches, self._gradients, self._result
        torch.cuda.empty_cache()

    def _record(self, batches: Sequence[AnyBatch]) -> torch.cuda.CUDAGraph:
        """Captures without running; stores the graph's own batches, gradients and result."""
        current().enter("capture")
        self._batches = [map_fields(Tensor.clone, batch) for batch in batches]
        if self._documents is not None:
            self._documents.declare(self._batches)
        if self._step_record is None and world_size() > 1:
            self._step_record = StepRecord.on(self._mesh.device)
            current().pending = self._step_record.pending
        graph, record = torch.cuda.CUDAGraph(), self._step_record
        if record is not None:
            record.reset()
        with ExitStack() as stack:
            # Meanwhile other threads pin batches and watch NCCL.
            stack.enter_context(torch.cuda.graph(graph, stream=self.cuda_stream, capture_error_mode="thread_local"))
            if record is not None:
                stack.enter_context(record.recording(current(), self.waits))
            stack.enter_context(ordered_cuda_streams(self._model))
            self._result = accumulate_gradients(self._model, self._batches, self._mesh, self._loss_scale)
        self._gradients = [(each, each.grad) for each in self._model.parameters() if each.grad is not None]
        current().enter("step")
        return graph


def first_obstacle(own: str | None) -> str | None:
    """The obstacle of the first rank that has one, the same on every rank; None: no rank has. A collective."""
    found = on_every_rank(lambda: own or "")
    rank = next((rank for rank, obstacle in enumerate(found) if obstacle), None)
    if rank is None or len(found) == 1:
        return own
    return f"rank {rank}: {found[rank]}"


@contextmanager
def recorded_waits(places: list[str]) -> Iterator[None]:
    """Adds the file and line of each op during the body for which a thread waits, as far as torch detects it: a
    backward runs in another thread. Other warnings are shown as always."""
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        show = warnings.showwarning

        def record(message: Any, category: Any, filename: str, lineno: int, file: Any = None, line: Any = None) -> None:
            if _WAITS in str(message):
                places.append(f"{filename}:{lineno}")
            else:
                show(message, category, filename, lineno, file, line)

        warnings.showwarning = record
        warnings.filterwarnings("always", message=_WAITS)
        warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(mode)


def _shapes(batch: AnyBatch) -> list[torch.Size | None]:
    return [None if field is None else field.shape for field in batch]
