"""DeepSpeed as the engine of a run: ZeRO over the data axis, with the mesh's tensor-parallel group."""

from __future__ import annotations

import argparse
import copy
import math
import os
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megalin.checkpoint.load import load
from megalin.checkpoint.manifest import Checkpoint
from megalin.checkpoint.tensors import initial_state, optimizer_name
from megalin.data.batch import AnyBatch
from megalin.errors import ConfigError, NumericError
from megalin.launch import launched
from megalin.model.block import Block
from megalin.model.build import Model, make_model
from megalin.optim.adamw import set_learning_rate
from megalin.optim.fused_adam import build_plain_optimizer
from megalin.parallel.collectives import all_reduce
from megalin.parallel.initialisation import init_weights
from megalin.parallel.localize import LocalLayout, localize
from megalin.parallel.mesh import Mesh
from megalin.slow_work import slow_work
from megalin.train.config import RunConfig
from megalin.train.deepspeed_settings import deepspeed_settings
from megalin.train.engine import FillWeights
from megalin.train.loss_scale import LOSS_SCALE_PREFIX, describe_lowest_scale, make_loss_scale, read_step
from megalin.train.spikes import SPIKES_PREFIX, make_spike_guard
from megalin.train.start_checks import check_same_self_tests
from megalin.train.step import NOTHING_CHANGED, StepResult
from megalin.train.step_timer import StepTimer
from megalin.train.update_hooks import UpdateHook, UpdateHooks

_MOMENTS = ("exp_avg", "exp_avg_sq")


class ModelParallelUnit:
    """The groups of a mesh under the names that DeepSpeed and Megatron use.

    Context-parallel ranks share samples and weights, so they are part of the data group.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh

    def get_model_parallel_group(self) -> dist.ProcessGroup:
        """The tensor-parallel group."""
        return self._mesh.tp_group

    def get_model_parallel_rank(self) -> int:
        """This rank's index in it."""
        return self._mesh.tp.axis.rank

    def get_model_parallel_world_size(self) -> int:
        """Its size."""
        return self._mesh.tp.size

    get_tensor_model_parallel_group = get_model_parallel_group
    get_tensor_model_parallel_rank = get_model_parallel_rank
    get_tensor_model_parallel_world_size = get_model_parallel_world_size

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        """The group of the data axis, replicate x shard."""
        return self._mesh.data_group

    def get_data_parallel_rank(self) -> int:
        """This rank's index in it."""
        return self._mesh.data.rank

    def get_data_parallel_world_size(self) -> int:
        """Its size."""
        return self._mesh.data.size

    def get_pipeline_model_parallel_rank(self) -> int:
        """Always 0: there are no stages."""
        return 0

    def get_pipeline_model_parallel_world_size(self) -> int:
        """Always 1: there are no stages."""
        return 1


class _LossSums(nn.Module):
    """The module that DeepSpeed wraps: maps a batch's inputs to the sums of its losses."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Mapping[str, Tensor]) -> Tensor:
        return self.model.loss_sums(inputs)


class DeepSpeedEngine:
    """A model, AdamW (NVIDIA Apex's if installed, else PyTorch's), and DeepSpeed's ZeRO around both.

    DeepSpeed averages gradients over the data axis. Losses are multiplied by its size, so that the gradient is that of
    the mean over the step's valid labels of all ranks and micro-batches, as with the fsdp2 engine.

    In bfloat16 and float16 DeepSpeed shards fp32 weights and moments, and computes with rounded weights. This includes
    the weights of exponentials and positions, which the fsdp2 engine leaves unrounded; both engines compute these in
    fp32. In float16 DeepSpeed multiplies losses by a constant, checks for overflows and divides gradients; the constant
    is set before each step to the scale of the fsdp2 engine's rule (docs/adr/0019-step-or-skip.md).

    Attributes:
        model: the model with plain parameters, this rank's shards; at stage 3 they are empty while unused.
        settings: DeepSpeed's JSON settings.
    """

    def __init__(self, config: RunConfig, mesh: Mesh, hooks: Sequence[UpdateHook] = ()) -> None:
        """Raises ConfigError for settings that DeepSpeed rejects. The config has passed `check_launch`."""
        self._mesh = mesh
        self.timer = StepTimer(mesh.device)
        self.settings = deepspeed_settings(config, dist.get_world_size())
        self._stage: int = self.settings["zero_optimization"]["stage"]
        self.model = _materialised(config, mesh)
        self._layout = LocalLayout(mesh, localize(self.model))
        self._parameters = dict(self.model.named_parameters())
        self._shapes = {name: parameter.shape for name, parameter in self._parameters.items()}
        self._loss_scale, self._spikes = make_loss_scale(config.train, mesh), make_spike_guard(config.train, mesh)
        rounds = config.train.dtype != "float32"
        # DeepSpeed makes its fp32 weights from rounded ones.
        unrounded = {name: self._shard(name, p.detach().clone()) for name, p in self._parameters.items() if rounds}
        optimizer = build_plain_optimizer(
            self.model,
            config.optimizer,
            no_decay=self.model.no_decay_names(),
            device=_update_device(self.settings, mesh.device),
            group_by_group=self._stage == 3,
        )
        with slow_work("starting DeepSpeed", shown=mesh.is_first_rank):
            self._engine = _initialize(self.model, optimizer, self.settings, mesh)
        self._optimizer: torch.optim.Optimizer = self._engine.basic_optimizer
        self._create_moments()
        for name, shard in unrounded.items():
            self._set(name, None, self._layout.join(name, shard.to(mesh.device)))
        if rounds:
            for module in self.model.full_precision_modules():
                module.register_forward_hook(_in_fp32)
        self._hooks = UpdateHooks(hooks, self._weights)
        self._has_stepped = False

    def step(self, batches: Sequence[AnyBatch], *, learning_rate: float, step: int) -> StepResult:
        self.timer.start()
        set_learning_rate(self._optimizer, learning_rate)
        if self._loss_scale is not None:  # the factor that undoes the mean must not cost range
            self._engine.optimizer.loss_scale = self._loss_scale.scale.item() / self._mesh.data.size
        counts = self._mesh.count_labels([batch.label_counts() for batch in batches])
        total = torch.zeros(counts.shape, dtype=torch.float64, device=counts.device)
        for index, batch in enumerate(batches):
            if index > 0:
                self._engine.step()  # DeepSpeed counts micro-batches by it
            losses = self._engine(batch.inputs()) / counts.clamp(min=1)
            self._engine.backward(losses.sum() * self._mesh.data.size, scale_wrt_gas=False)
            total += losses.detach()
            del losses  # before the next forward, which needs the memory
        sums = self._mesh.sum_over_data(total)
        duration = self.timer.end()  # reading the sums waits for it; the update counts for the next step
        terms: list[float] = sums.tolist()
        if not self._has_stepped:
            check_same_self_tests()
            self._has_stepped = True
        norm = self._gradient_norm() if self._stage == 0 else math.nan  # DeepSpeed reports none there
        if math.isfinite(sum(terms)) and (self._stage > 0 or math.isfinite(norm)):
            self._engine.step()
            if self._stage > 0:  # infinite if DeepSpeed skipped the update
                norm = float(self._engine.get_global_grad_norm())
        result = StepResult(sum(terms), norm, int(counts[0]), tuple(terms), duration.seconds())
        applied = math.isfinite(result.loss) and math.isfinite(norm)
        self.model.after_optimizer_step()
        self._hooks.after_update(applied=torch.full((), applied, device=self._mesh.device), step=step)
        return self._judge(result, step)

    def _judge(self, result: StepResult, step: int) -> StepResult:
        """Adds the loss scaling of a step and its comparison with those before to its result. Raises NumericError if
        the loss or the gradient is not finite, in float16 a gradient only with the lowest loss scale."""
        loss, norm = result.loss, result.grad_norm
        problem = (
            "" if math.isfinite(loss) and math.isfinite(norm) else f"loss {loss}, gradient norm {norm} is not finite"
        )
        if self._loss_scale is not None and math.isfinite(loss):
            values = self._loss_scale.update(torch.full((), not math.isfinite(norm), device=self._mesh.device))
            scaling = read_step(values.tolist())
            result = result._replace(scaling=scaling)
            problem = describe_lowest_scale(scaling) if self._loss_scale.must_stop(scaling) else ""
        if problem:
            raise NumericError(
                f'step {step}: {problem}. {NOTHING_CHANGED}; train.engine = "fsdp2" names the parameters'
            )
        values = torch.tensor([loss, norm], dtype=torch.float64, device=self._mesh.device)
        return result._replace(spike=self._spikes.read(self._spikes.judge(*values)[1].tolist()))

    def report_lines(self) -> list[str]:
        return []

    def before_evaluation(self) -> None:
        pass

    def tensors(self) -> Mapping[str, Tensor]:
        tensors: dict[str, Tensor] = {name: self._shard(name, self._get(name, None)) for name in self._parameters}
        (count,) = {int(state["step"]) for state in self._optimizer.state.values()}
        for name in self._parameters:
            tensors[optimizer_name(name, "step")] = torch.tensor(float(count))
            for key in _MOMENTS:
                tensors[optimizer_name(name, key)] = self._shard(name, self._get(name, key))
        scale = {} if self._loss_scale is None else self._loss_scale.tensors()
        return tensors | scale | self._spikes.tensors() | self._hooks.tensors()

    def replicas(self) -> Mapping[str, Tensor]:
        return dict(self.model.named_buffers())

    def wait_before_update(self, copied: torch.cuda.Event) -> None:
        torch.cuda.current_stream().wait_event(copied)

    def load(self, checkpoint: Checkpoint) -> None:
        shards = {(name, key): self._empty(name) for name in self._parameters for key in (None, *_MOMENTS)}
        tensors: dict[str, Tensor] = {
            name if key is None else optimizer_name(name, key): shard for (name, key), shard in shards.items()
        }
        steps = {optimizer_name(name, "step"): torch.zeros(()) for name in self._parameters}
        saved = self._hooks.saved_in(checkpoint)
        scale = {} if self._loss_scale is None else self._loss_scale.saved_in(checkpoint)
        state = scale | self._spikes.saved_in(checkpoint) | saved.tensors
        load(checkpoint, tensors | steps | state, ignore=(*saved.ignored, LOSS_SCALE_PREFIX, SPIKES_PREFIX))
        for (name, key), shard in shards.items():
            self._set(name, key, self._layout.join(name, shard.to(self._mesh.device)))
        (count,) = {int(step) for step in steps.values()}
        for state in self._optimizer.state.values():
            state["step"].fill_(count)
        self.model.after_optimizer_step()
        self._hooks.start(saved.missing)

    def set_weights(self, fill: FillWeights) -> None:
        shards = {name: self._empty(name) for name in self._parameters}
        for name in fill(shards):
            self._set(name, None, self._layout.join(name, shards[name].to(self._mesh.device)))
        self.model.after_optimizer_step()
        self._hooks.restart()

    def close(self) -> None:
        """Does nothing: this engine holds no such resource."""

    def _weights(self) -> dict[str, Tensor]:
        """This rank's shards of the fp32 weights, for hooks; each weight is gathered for it."""
        return {name: self._layout.split(name, self._get(name, None)) for name in self._parameters}

    def _empty(self, name: str) -> Tensor:
        """Uninitialised memory for this rank's shard of a weight or moment, on the CPU."""
        return self._layout.empty(name, self._shapes[name])

    def _shard(self, name: str, whole: Tensor) -> Tensor:
        """This rank's shard of a weight or moment, for a checkpoint."""
        return self._layout.split(name, whole).to("cpu")

    def _create_moments(self) -> None:
        """Creates zero moments, which AdamW would create in its first step, so that they can be loaded."""
        groups = self._optimizer.param_groups
        flat = [parameter for group in groups for parameter in group["params"]]
        if self._stage == 3:  # the groups hold their shards of the weights during a step only
            flat = self._engine.optimizer.fp32_partitioned_groups_flat
        for parameter in flat:
            self._optimizer.state[parameter] = initial_state(groups[0], parameter)
        if self._stage in (1, 2):
            self._engine.optimizer._lazy_init_hp_params_optimizer_state()

    def _get(self, name: str, key: str | None) -> Tensor:
        """The fp32 weight or the moment `key` of a parameter, gathered on each rank of the data axis."""
        from deepspeed import utils

        parameter = self._parameters[name]
        if self._stage == 0:
            return parameter.detach() if key is None else self._optimizer.state[parameter][key]
        if key is None:
            return utils.safe_get_full_fp32_param(parameter)
        return utils.safe_get_full_optimizer_state(parameter, key)

    def _set(self, name: str, key: str | None, value: Tensor) -> None:
        """Inverse of `_get`; also sets the rounded weight that DeepSpeed computes with."""
        from deepspeed import utils, zero

        parameter = self._parameters[name]
        if key is None:
            with zero.GatheredParameters([parameter], modifier_rank=0), torch.no_grad():
                parameter.copy_(value)
        if self._stage == 0:
            if key is not None:
                self._optimizer.state[parameter][key].copy_(value)
        elif self._stage == 3:
            # By shards: the call for a whole value fails if the data axis does not divide it.
            size = -(-value.numel() // self._mesh.data.size)
            padded = torch.nn.functional.pad(value.flatten(), (0, size * self._mesh.data.size - value.numel()))
            shard = padded.narrow(0, size * self._mesh.data.rank, size)
            if key is None:
                utils.safe_set_local_fp32_param(parameter, shard)
            else:
                utils.safe_set_local_optimizer_state(parameter, shard, key)
        elif key is None:
            utils.safe_set_full_fp32_param(parameter, value)
        else:
            utils.safe_set_full_optimizer_state(parameter, value, key)

    def _gradient_norm(self) -> float:
        """L2 norm of the whole gradient, which each rank of the data axis holds in its parameters."""
        squares = torch.zeros(2, dtype=torch.float64, device=self._mesh.device)  # of shards, of replicas
        for parameter in self._parameters.values():
            assert parameter.grad is not None
            is_slice = getattr(parameter, "tensor_model_parallel", False)
            squares[0 if is_slice else 1] += parameter.grad.square().sum(dtype=torch.float64)
        return math.sqrt((all_reduce(squares[0], self._mesh.tp.axis) + squares[1]).item())


def _materialised(config: RunConfig, mesh: Mesh) -> Model:
    train = config.train
    model = make_model(
        config.model,
        mesh.tp,
        cp=mesh.cp,
        recompute=train.recompute,
        max_label_fraction=train.max_label_fraction,
    )
    if train.compile:
        for block in model.block_list():
            block.compile(fullgraph=True, dynamic=False)
    model.to_empty(device=mesh.device)
    init_weights(model, train.seed)
    return model


def _update_device(settings: Mapping[str, Any], device: torch.device) -> torch.device:
    """Device of the weights and moments during an update."""
    offload = settings["zero_optimization"].get("offload_optimizer") or {}
    return torch.device("cpu") if offload.get("device") == "cpu" else device


def _initialize(model: Model, optimizer: torch.optim.Optimizer, settings: dict[str, Any], mesh: Mesh) -> Any:
    """Creates DeepSpeed's own engine, without compiling its ops. Raises ConfigError for settings that it rejects."""
    os.environ.setdefault("DS_ACCELERATOR", mesh.device.type)
    os.environ.setdefault("LOCAL_RANK", str(launched().local_rank))
    import deepspeed

    if mesh.device.type == "cpu":  # else it compiles shared-memory collectives, which gloo has
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        # PyTorch computes in float16 without oneDNN's kernels too, which DeepSpeed looks for.
        deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True
    # DeepSpeed calls collectives by names that torch 2.12 changed; torch would warn at every change of weights.
    warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning)
    deepspeed.init_distributed()  # uses the existing process group
    groups = ModelParallelUnit(mesh)
    try:
        deepspeed.DeepSpeedConfig(copy.deepcopy(settings), groups)
    except (ValueError, AssertionError, deepspeed.DeepSpeedConfigError) as error:
        raise ConfigError(f"DeepSpeed rejects the settings of train.deepspeed_config: {error}") from None
    deepspeed.utils.set_z3_leaf_modules(model, [Block])
    engine, *_ = deepspeed.initialize(
        args=argparse.Namespace(device_rank=mesh.device.index or 0),
        model=_LossSums(model),
        optimizer=optimizer,
        config=copy.deepcopy(settings),
        mpu=groups,
    )
    return engine


def _in_fp32(module: nn.Module, inputs: object, outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(output.float() for output in outputs)
