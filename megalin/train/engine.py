"""Training engines: the interface of both, and the one on PyTorch's fully_shard."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, TypedDict

import torch
import torch.distributed as dist
from torch import Tensor

from megalin.checkpoint.load import load
from megalin.checkpoint.manifest import Checkpoint
from megalin.checkpoint.tensors import training_tensors, weights
from megalin.data.batch import AnyBatch
from megalin.optim.adamw import build_optimizer, set_learning_rate
from megalin.parallel.agreement import on_every_rank
from megalin.parallel.compute_waits import ComputeWaits
from megalin.parallel.data_parallel import measure_waits
from megalin.parallel.mesh import Mesh
from megalin.parallel.weight_copies import expire_weight_copies
from megalin.train.build import TrainedModel, build_model
from megalin.train.compute_dtypes import COMPUTE_DTYPES
from megalin.train.config import RunConfig
from megalin.train.cuda_graphs import GradientGraph
from megalin.train.float8 import check_float8_device, float8_settings, report_matmuls
from megalin.train.graph_choice import automatic_obstacle, mixers_that_read_documents
from megalin.train.loss_scale import LOSS_SCALE_PREFIX, LossScale, make_loss_scale
from megalin.train.pipeline_model import Pipeline
from megalin.train.replicas import distributed_tensors
from megalin.train.spikes import SPIKES_PREFIX, SpikeGuard, make_spike_guard
from megalin.train.step import LaunchedStep, PendingStep, apply_gradients, train_step
from megalin.train.step_timer import StepTimer
from megalin.train.tree_gradients import accumulate_by_tree, check_tree_threads
from megalin.train.update_hooks import UpdateHook, UpdateHooks

FillWeights = Callable[[Mapping[str, Tensor]], Collection[str]]
"""Sets some of the given weights in place and returns their names; see `Engine.set_weights`."""


class Engine(Protocol):
    """A model with its optimizer on this rank's mesh. Every method is a collective.

    Checkpoints are the same for every engine: fp32 weights, AdamW's moments and the tensors of update hooks as
    distributed tensors under their global names, so a run may resume with a different engine. Update hooks are called
    at the end of each step's launch (`UpdateHook`).
    """

    @property
    def model(self) -> TrainedModel:
        """The model, for forwards without a backward."""

    @property
    def timer(self) -> StepTimer:
        """Measures the steps; pause it before the device is used for anything but steps."""

    @property
    def settings(self) -> Mapping[str, Any]:
        """JSON settings that the engine's library received; empty without such."""

    def step(self, batches: Sequence[AnyBatch], *, learning_rate: float, step: int) -> PendingStep:
        """Launches one update of the weights from a step's micro-batches; `step` is for messages. The caller may launch
        the next step before it waits for this one's result.

        Raises:
            NumericError: as `PendingStep.wait` does, if the engine waits for the result itself.
        """

    def report_lines(self) -> list[str]:
        """Lines on choices that were made in the steps since the last call, for people."""

    def before_evaluation(self) -> None:
        """Frees memory that steps keep, where an evaluation needs it; steps allocate it again."""

    def tensors(self) -> Mapping[str, Tensor]:
        """The tensors of a checkpoint."""

    def replicas(self) -> Mapping[str, Tensor]:
        """Tensors to compare with their copies on other ranks (`ReplicaCheck`): the model's constants, and distributed
        ones of a checkpoint, unless the engine keeps their copies equal itself."""

    def wait_before_update(self, copied: torch.cuda.Event) -> None:
        """Makes the next update of the weights wait on the GPU for an event: that of a copy of `tensors`."""

    def load(self, checkpoint: Checkpoint) -> None:
        """Loads weights, moments and the state of update hooks from a checkpoint of any mesh and engine.

        Raises:
            CheckpointError: on every rank, before anything is changed, when it does not fit the model.
        """

    def set_weights(self, fill: FillWeights) -> None:
        """Sets weights before the first step, and starts the update hooks from them; the moments stay zero.

        Args:
            fill: receives all fp32 weights of this rank by global name, plain or distributed, sets some in place and
                returns their names. A collective.
        """

    def close(self) -> None:
        """Releases resources that would block the shutdown of the process group."""


class _StepOptions(TypedDict):
    """Options of `train_step` and `apply_gradients`."""

    max_grad_norm: float | None
    step: int
    timer: StepTimer
    loss_scale: LossScale | None
    spikes: SpikeGuard | None
    compare_kernels: bool
    copied: torch.cuda.Event | None


class FullyShardedEngine:
    """Engine on fully_shard (FSDP2), or on a pipeline of such stages, with PyTorch's AdamW."""

    def __init__(self, config: RunConfig, mesh: Mesh, hooks: Sequence[UpdateHook] = ()) -> None:
        train, float8 = config.train, float8_settings(config.train)
        if float8 is not None:
            check_float8_device(mesh.device)
            report_matmuls(config.model, config.parallel, float8, mesh.device.type)
        self._uses_tree = train.reduction == "tree"
        if self._uses_tree:
            on_every_rank(partial(check_tree_threads, mesh.device))
        self.model: TrainedModel = build_model(
            config.model,
            mesh,
            compute_dtype=COMPUTE_DTYPES[train.dtype],
            recompute=train.recompute,
            compile_blocks=train.compile,
            seed=train.seed,
            length=config.data.sequence_length,
            overlap=train.cuda_graphs is True,
            max_label_fraction=train.max_label_fraction,
            float8=float8,
            accumulates=train.global_batch_size > train.micro_batch_size * mesh.samples.size,
            reduces=not self._uses_tree,
        )
        self._optimizer = build_optimizer(
            self.model, config.optimizer, no_decay=self.model.no_decay_names(), same_on_any_shard=self._uses_tree
        )
        self.timer = StepTimer(mesh.device)
        self._loss_scale, self._spikes = make_loss_scale(train, mesh), make_spike_guard(train, mesh)
        self.settings: Mapping[str, Any] = {}
        self._mesh, self._max_grad_norm = mesh, config.optimizer.max_grad_norm
        self._copied: torch.cuda.Event | None = None
        self._graph = self._make_graph(config)
        # In a graph, unless collectives run in compiled blocks or through symmetric memory.
        self._sees_every_wait = not train.compile and mesh.tp.buffers is None
        self._hooks = UpdateHooks(hooks, partial(weights, self.model))
        self._has_stepped = False

    def _make_graph(self, config: RunConfig) -> GradientGraph | None:
        """The graph of the steps; None where the config, the mesh or the device has none."""
        automatic = config.train.cuda_graphs == "auto"
        if not config.train.cuda_graphs:
            return None
        if automatic and automatic_obstacle(
            config, device=self._mesh.device.type, world_size=dist.get_world_size(), environment=os.environ
        ):
            return None
        assert not isinstance(self.model, Pipeline), config.parallel
        scale = None if self._loss_scale is None else self._loss_scale.scale
        reads = bool(mixers_that_read_documents(config))
        return GradientGraph(self.model, self._mesh, scale, automatic=automatic, reads_documents=reads)

    @property
    def replays(self) -> bool:
        """Whether steps are replays of a CUDA graph from here on."""
        return self._graph is not None and self._graph.is_captured

    def step(self, batches: Sequence[AnyBatch], *, learning_rate: float, step: int) -> PendingStep:
        set_learning_rate(self._optimizer, learning_rate)
        options = _StepOptions(
            max_grad_norm=self._max_grad_norm,
            step=step,
            timer=self.timer,
            loss_scale=self._loss_scale,
            spikes=self._spikes,
            compare_kernels=not self._has_stepped,
            copied=self._copied,
        )
        self._has_stepped, self._copied = True, None
        if self._uses_tree:
            launched = self._step_by_tree(batches, options)
        elif self._graph is None:
            launched = train_step(self.model, self._optimizer, batches, self._mesh, **options)
        else:
            self.timer.start()
            losses, counts = self._graph.accumulate_gradients(batches)
            self.timer.measures_every_wait = self._graph.is_captured and self._sees_every_wait
            launched = apply_gradients(self.model, self._optimizer, losses, counts, **options)
        self._hooks.after_update(applied=launched.applied, step=step)
        if self.timer.waits is None and self._compares_own_times:
            self._measure_waits()
        return launched

    def _step_by_tree(self, batches: Sequence[AnyBatch], options: _StepOptions) -> LaunchedStep:
        assert not isinstance(self.model, Pipeline), self.model
        self.timer.start()
        scale = None if self._loss_scale is None else self._loss_scale.scale
        found = accumulate_by_tree(self.model, batches, self._mesh, scale)
        return apply_gradients(self.model, self._optimizer, found.losses, found.counts, grad_norm=found.norm, **options)

    @property
    def _compares_own_times(self) -> bool:
        """Whether waits of this rank's GPU are measured: some are not seen in the stages of a pipeline, and eagerly
        those within blocks, so that without ranks that read other samples there is nothing to compare."""
        ranks = self._mesh.samples.size if self._graph is None else dist.get_world_size()
        return self._mesh.device.type == "cuda" and self._mesh.pp.size == 1 and ranks > 1

    def _measure_waits(self) -> None:
        """Measures this rank's own time from the next step on; FSDP has created its CUDA streams in the first one."""
        captured_on = None if self._graph is None else self._graph.cuda_stream
        self.timer.waits = waits = ComputeWaits(torch.cuda.current_stream(), captured_on=captured_on)
        measure_waits(self.model, waits)
        self._mesh.launches.measure_wait = waits.measured_on_current
        if self._graph is not None:
            self._graph.waits = waits

    def report_lines(self) -> list[str]:
        return [] if self._graph is None else self._graph.report_lines()

    def before_evaluation(self) -> None:
        if self._graph is not None:
            self._graph.before_evaluation()

    def tensors(self) -> Mapping[str, Tensor]:
        scale = {} if self._loss_scale is None else self._loss_scale.tensors()
        state = scale | self._spikes.tensors() | self._hooks.tensors()
        return training_tensors(self.model, self._optimizer) | state

    def replicas(self) -> Mapping[str, Tensor]:
        model = self.model
        constants = model.constants() if isinstance(model, Pipeline) else dict(model.named_buffers())
        return distributed_tensors(self.tensors()) | constants

    def wait_before_update(self, copied: torch.cuda.Event) -> None:
        self._copied = copied

    def load(self, checkpoint: Checkpoint) -> None:
        tensors = training_tensors(self.model, self._optimizer)
        saved = self._hooks.saved_in(checkpoint)
        scale = {} if self._loss_scale is None else self._loss_scale.saved_in(checkpoint)
        state = tensors | scale | self._spikes.saved_in(checkpoint) | saved.tensors
        load(checkpoint, state, ignore=(*saved.ignored, LOSS_SCALE_PREFIX, SPIKES_PREFIX))
        expire_weight_copies(self.model)
        self.model.after_optimizer_step()
        self._hooks.start(saved.missing)

    def set_weights(self, fill: FillWeights) -> None:
        fill(weights(self.model))
        expire_weight_copies(self.model)
        self.model.after_optimizer_step()
        self._hooks.restart()

    def close(self) -> None:
        if self._graph is not None:
            self._graph.close()
