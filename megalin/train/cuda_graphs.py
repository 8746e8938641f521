"""CUDA graph of a step's forwards and backwards: captured once, then launched by a single call."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
from torch import Tensor

from megalin.data.batch import AnyBatch, map_fields
from megalin.errors import ConfigError
from megalin.model.build import Model
from megalin.parallel.data_parallel import ordered_cuda_streams
from megalin.parallel.heartbeats import current
from megalin.parallel.mesh import Mesh
from megalin.parallel.weight_copies import refresh_weight_copies
from megalin.train.step import accumulate_gradients

WARM_UP_STEPS = 3
"""Eager steps before the capture: they compile, choose kernels and open communicators, which a capture cannot."""


class GradientGraph:
    """`accumulate_gradients` of one model, for steps that take the host longer to launch than the device to run.

    After the eager steps it captures one, and from then on replays it: the same kernels on the same CUDA streams,
    collectives included, so the same bits. The graph's outputs, activations and gradients, keep their memory between
    steps; the weights that it reads must keep theirs.

    Raises:
        ConfigError: no GPU, or settings under which a captured collective reads unmapped memory.
    """

    def __init__(self, model: Model, mesh: Mesh, loss_scale: Tensor | None = None) -> None:
        """`loss_scale` [] keeps its memory, as the weights do."""
        if mesh.device.type != "cuda":
            raise ConfigError(
                f"train.cuda_graphs = true, but this run computes on a {mesh.device.type} device, which has no "
                "CUDA graphs; set it to false"
            )
        allocator = os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "") + os.environ.get("PYTORCH_ALLOC_CONF", "")
        if "expandable_segments:True" in allocator and os.environ.get("NCCL_GRAPH_REGISTER") != "0":
            raise ConfigError(
                "train.cuda_graphs = true with the allocator's expandable_segments:True: NCCL would register buffers "
                "of the graph by addresses that are not fixed; set NCCL_GRAPH_REGISTER=0 in the environment"
            )
        self._model, self._mesh, self._loss_scale = model, mesh, loss_scale
        self._stream = torch.cuda.Stream(mesh.device)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._eager_steps = 0

    def accumulate_gradients(self, batches: Sequence[AnyBatch]) -> tuple[Tensor, Tensor]:
        """`accumulate_gradients` of micro-batches, with the same number and shapes at each call.

        The parameters have no gradients before the call. The gradients and the result are valid until the next call.
        """
        if self._eager_steps < WARM_UP_STEPS:
            self._eager_steps += 1
            return self._run(batches)
        refresh_weight_copies(self._model)  # neither captured nor checked by the graph
        if self._graph is None:
            self._graph = self._record(batches)
        shapes = [_shapes(batch) for batch in batches]
        assert shapes == [_shapes(batch) for batch in self._batches], shapes
        for recorded, batch in zip(self._batches, batches, strict=True):
            map_fields(Tensor.copy_, recorded, batch)
        self._graph.replay()
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        return self._result

    def close(self) -> None:
        """Frees the graph; a process group whose collectives it contains would wait for it at shutdown."""
        if self._graph is not None:
            self._graph.reset()
            self._graph = None

    def _run(self, batches: Sequence[AnyBatch]) -> tuple[Tensor, Tensor]:
        """Runs eagerly on the CUDA stream of the capture, so that autograd nodes record no other stream."""
        outside = torch.cuda.current_stream()
        self._stream.wait_stream(outside)
        with torch.cuda.stream(self._stream):
            result = accumulate_gradients(self._model, batches, self._mesh, self._loss_scale)
        outside.wait_stream(self._stream)
        return result

    def _record(self, batches: Sequence[AnyBatch]) -> torch.cuda.CUDAGraph:
        """Captures without running; stores the graph's own batches, gradients and result."""
        current().enter("capture")
        self._batches = [map_fields(Tensor.clone, batch) for batch in batches]
        graph = torch.cuda.CUDAGraph()
        # Meanwhile other threads pin batches and watch NCCL.
        recording = torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local")
        with recording, ordered_cuda_streams(self._model):
            self._result = accumulate_gradients(self._model, self._batches, self._mesh, self._loss_scale)
        self._gradients = [(each, each.grad) for each in self._model.parameters() if each.grad is not None]
        current().enter("step")
        return graph


def _shapes(batch: AnyBatch) -> list[torch.Size | None]:
    return [None if field is None else field.shape for field in batch]
