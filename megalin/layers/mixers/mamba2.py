"""Mamba-2's token mixer: a recurrence of narrow heads whose one decay a token is selected by the input."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from megalin.errors import ConfigError
from megalin.layers.decay import draw_step_bias
from megalin.layers.gates import MixerGates
from megalin.layers.halo import entering_inputs
from megalin.layers.mixer_configs.mamba2 import Mamba2Config
from megalin.layers.mixers.base import BuildContext, FullPrecision, Mixer, MixerContext, MixerOutput, State
from megalin.ops.dispatch.dtypes import compute_dtype
from megalin.ops.dispatch.overrides import bypasses
from megalin.ops.dispatch.projection_part import ProjectionPart
from megalin.ops.gates.scaled_heads import scaled_heads
from megalin.ops.scans.projected_conv import projected_conv
from megalin.ops.scans.scalar_decay import scalar_decay_scan, scalar_decay_scan_flops, scalar_decay_step
from megalin.ops.scans.short_conv import short_conv
from megalin.parallel.initialisation import Initializer, constant, normal, uniform
from megalin.parallel.linear import ColumnParallelLinear, GroupNormedRowParallelLinear, NormedRowParallelLinear, Skip
from megalin.parallel.tensor_parallel import TensorParallel, local


class HeadRates(FullPrecision):
    """A_log, the bias of the time step, and the feed-through D: one number a head each, heads split over the axis."""

    def __init__(self, num_heads: int, tp: TensorParallel) -> None:
        super().__init__()
        self.a_log = tp.parameter(num_heads, shard_dim=0)
        self.step_bias = tp.parameter(num_heads, shard_dim=0)
        self.feed_through = tp.parameter(num_heads, shard_dim=0)

    def init_weights(self, initializer: Initializer) -> None:
        """A uniform in [1, 16], softplus(bias) log-uniform in [0.001, 0.1], D one."""
        initializer(self.a_log, "a_log", lambda full, generator: full.uniform_(1.0, 16.0, generator=generator).log_())
        initializer(self.step_bias, "step_bias", draw_step_bias)
        initializer(self.feed_through, "feed_through", constant(1.0))

    def forward(self) -> tuple[Tensor, ...]:
        return tuple(local(p).clone() for p in (self.a_log, self.step_bias, self.feed_through))


class _ScanInputs(NamedTuple):
    """Inputs of the scan of this rank's heads, and of the output projection."""

    q: Tensor  # [B, T, 1 or H/tp, N]
    k: Tensor  # [B, T, 1 or H/tp, N]
    v: Tensor  # [B, T, H/tp, P]
    log_decay: Tensor  # [B, T, H/tp]
    time_step: Tensor  # [B, T, H/tp]
    x: Tensor  # [B, T, H/tp, P]
    gate: Tensor | ProjectionPart  # [B, T, M/tp]
    conv_states: tuple[Tensor, ...]  # [B, taps - 1, M/tp], [B, taps - 1, 2 G N or 2 G/tp N]; empty where none was given


class _Convolved(NamedTuple):
    """Results of the convolutions, and the gate of the same projection."""

    x: Tensor  # [B, T, M/tp]
    bc: Tensor  # [B, T, 2 G N or 2 G/tp N]
    gate: Tensor | ProjectionPart  # [B, T, M/tp]
    states: tuple[Tensor, ...]  # of x and of [B | C]; empty where none was given


class Mamba2(Mixer):
    """y = RMSNorm((o + D x) silu(z)) W_out of width m = 2 D; a block needs no channel mixer.

        [z | x] = X W_zx,  [B | C] = X W_bc,  x, B, C <- silu(conv(x, B, C)),  dt = softplus(X W_dt + b)
        o = scan(C, B, dt x; -exp(A_log) dt), heads of P values with K = N, all reading the same B and C

    With G groups there are G of B and C, each read by H / G heads in order, and the norm is over each group's channels.

    Tensor parallel over heads. One group: every rank computes B and C; their weights' gradients flow through this
    rank's heads alone, so they are partial sums. Several: each rank computes those of its own heads.

    Source: Mamba-2 section 7; groups: section 7.1.
    """

    def __init__(self, config: Mamba2Config, scope: BuildContext) -> None:
        super().__init__()
        self.config, self.tp, self.cp, self.std = config, scope.tp, scope.cp, scope.init_std
        self.width, tp = scope.hidden_size, scope.tp
        self.inner = 2 * self.width
        self.num_heads, remainder = divmod(self.inner, config.head_dim)
        if remainder:
            raise ConfigError(
                f"{scope.path}.head_dim = {config.head_dim} does not divide twice model.hidden_size = {self.inner}; "
                "choose a divisor"
            )
        name = f"the number of heads of {scope.path}, twice model.hidden_size / head_dim,"
        self.local_heads = tp.divide(self.num_heads, name)
        self.zx = ColumnParallelLinear(self.width, self.inner, parts=2, tp=tp, std=self.std, name=name)
        self.time_step = ColumnParallelLinear(self.width, self.num_heads, tp=tp, std=self.std, name=name)
        taps = config.conv_width
        self.conv_weight = tp.parameter(self.inner, taps, shard_dim=0)
        self.conv_bias = tp.parameter(self.inner, shard_dim=0)
        self.local_groups = self._divide_groups(scope)
        self.bc, self.bc_conv_weight = self._group_parameter(self.width), self._group_parameter(taps)
        self.bc_conv_bias = self._group_parameter()
        self.full_precision = HeadRates(self.num_heads, tp)
        eps, groups, std = config.norm_eps, config.num_groups, scope.output_std
        self.out: NormedRowParallelLinear | GroupNormedRowParallelLinear
        if groups == 1:
            self.out = NormedRowParallelLinear(
                self.inner, self.width, eps=eps, tp=tp, std=std, name=name, norm="rmsnorm"
            )
        else:
            self.out = GroupNormedRowParallelLinear(
                self.inner, self.width, groups=groups, eps=eps, tp=tp, std=std, name=name
            )

    def _divide_groups(self, scope: BuildContext) -> int:
        """This rank's number of groups. Raises ConfigError where the sizes do not divide."""
        groups = self.config.num_groups
        if self.num_heads % groups:
            raise ConfigError(
                f"{scope.path}.num_groups = {groups} does not divide the {self.num_heads} heads, twice "
                "model.hidden_size / head_dim; choose a divisor"
            )
        return 1 if groups == 1 else self.tp.divide(groups, f"{scope.path}.num_groups")

    def _group_parameter(self, *shape: int) -> nn.Parameter:
        """Rows of B and C: [2 N, ...] on every rank for one group, else [2, G N, ...] sharded over the axis."""
        size, groups = self.config.state_size, self.config.num_groups
        if groups == 1:
            return self.tp.parameter(2 * size, *shape, shard_dim=None)
        return self.tp.parameter(2, groups * size, *shape, shard_dim=1)

    def init_weights(self, initializer: Initializer) -> None:
        """Draws the matrix of B and C from N(0, std^2), convolutions uniformly within 1 / sqrt(taps), as torch does."""
        initializer(self.bc, "bc", normal(self.std))
        for name in ("conv_weight", "conv_bias", "bc_conv_weight", "bc_conv_bias"):
            initializer(getattr(self, name), name, uniform(1.0 / math.sqrt(self.config.conv_width)))

    def forward(self, x: Tensor, context: MixerContext, state: State | None) -> MixerOutput:
        inputs = self._scan_inputs(x, context, state)
        k, v, log_decay = inputs.k, inputs.v, inputs.log_decay
        scan = scalar_decay_scan(
            inputs.q,
            k,
            v,
            log_decay,
            initial_state=state[2] if state else None,
            shard=self.cp.sequence_shard(context.documents.shard),
            state_gradient=False,
            document_ids=context.documents.ids,
            chunk_size=self.config.chunk_size,
        )
        y = self._output(scan.output, inputs, context)
        return MixerOutput(y, () if state is None else (*inputs.conv_states, scan.state))

    @bypasses("forward")
    def step(self, x: Tensor, context: MixerContext, state: State) -> MixerOutput:
        inputs = self._scan_inputs(x, context, state)
        q, k, v, log_decay = (y[:, 0] for y in (inputs.q, inputs.k, inputs.v, inputs.log_decay))
        scan = scalar_decay_step(q, k, v, log_decay, state[2], in_place=context.in_place)
        return MixerOutput(self._output(scan.output[:, None], inputs, context), (*inputs.conv_states, scan.state))

    def gate_values(self, x: Tensor, context: MixerContext) -> MixerGates:
        """-exp(A_log) dt and dt, one number a head."""
        inputs = self._scan_inputs(x, context, None)
        return MixerGates(inputs.log_decay[..., None], gates={"time_step": inputs.time_step[..., None]})

    def _scan_inputs(self, x: Tensor, context: MixerContext, state: State | None) -> _ScanInputs:
        entered = self.tp.enter(x)
        (step,) = self.time_step(entered)  # [B, T, H/tp]
        bc_map, bc_conv_weight, bc_conv_bias = map(self._group_rows, (self.bc, self.bc_conv_weight, self.bc_conv_bias))
        bc = functional.linear(entered, bc_map)  # [B, T, 2 G N or 2 G/tp N]
        bc_weights = (bc_conv_weight, bc_conv_bias)
        conv = self._convolved(entered, bc, bc_weights, context, state)
        k, q = conv.bc.unflatten(-1, (2, self.local_groups, -1)).unbind(-3)  # [B, T, 1 or G/tp, N]
        if self.local_groups > 1:
            k, q = (y.repeat_interleave(self.local_heads // self.local_groups, dim=2) for y in (k, q))
        a_log, step_bias, _ = context.full_precision
        step = functional.softplus(step.to(compute_dtype(step)) + step_bias)
        heads = conv.x.unflatten(-1, (self.local_heads, self.config.head_dim))
        v, log_decay = scaled_heads(heads, step), -torch.exp(a_log) * step
        return _ScanInputs(q, k, v, log_decay, step, heads, conv.gate, conv.states)

    def _convolved(
        self,
        entered: Tensor,
        bc: Tensor,
        bc_weights: tuple[Tensor, Tensor],
        context: MixerContext,
        state: State | None,
    ) -> _Convolved:
        """x and [B | C] after their convolutions, and the gate."""
        documents, weights = context.documents.ids, (local(self.conv_weight), local(self.conv_bias))
        if state is None and context.documents.shard is None:
            # A full sequence from its start: the gradients of the gate and of x are written as one.
            found = projected_conv(self.zx(entered, split_parts=False), *weights, part=1, document_ids=documents)
            bc_conv = short_conv(bc, *bc_weights, document_ids=documents)
            return _Convolved(found.output, bc_conv.output, found.other, ())
        gate, x = self.zx(entered)  # [B, T, M/tp]
        states = state[:2] if state else self._entering_inputs(x, bc, context)
        conv = short_conv(x, *weights, state=states[0], document_ids=documents)
        bc_conv = short_conv(bc, *bc_weights, state=states[1], document_ids=documents)
        return _Convolved(conv.output, bc_conv.output, gate, (conv.state, bc_conv.state))

    def _group_rows(self, parameter: nn.Parameter) -> Tensor:
        """This rank's rows of B and C, B first. Those of one group meet the heads of all ranks."""
        if self.config.num_groups == 1:
            return self.tp.all_reduce_gradient(local(parameter))
        return local(parameter).flatten(0, 1)

    def _entering_inputs(self, x: Tensor, bc: Tensor, context: MixerContext) -> tuple[Tensor | None, ...]:
        """The halo of both convolutions, in one collective."""
        if context.documents.shard is None:
            return None, None
        before = entering_inputs(torch.cat([x, bc], dim=-1), context, self.cp, taps=self.config.conv_width)
        assert before is not None
        return before.split([x.shape[-1], bc.shape[-1]], dim=-1)

    def _output(self, scanned: Tensor, inputs: _ScanInputs, context: MixerContext) -> Tensor:
        """The scan's output [B, T, H/tp, P] -> y in the layout of the residual stream."""
        feed_through = context.full_precision[2].repeat_interleave(self.config.head_dim)  # [M/tp]
        y: Tensor = self.out(scanned.flatten(2), inputs.gate, skip=Skip(inputs.x.flatten(2), feed_through))
        return y

    def flops(self, length: int) -> int:
        scan = scalar_decay_scan_flops(
            length,
            num_heads=self.num_heads,
            num_key_heads=self.config.num_groups,
            key_dim=self.config.state_size,
            value_dim=self.config.head_dim,
            chunk_size=self.config.chunk_size,
        )
        shared = 2 * self.width * 2 * self.config.num_groups * self.config.state_size
        return self.zx.flops() + self.time_step.flops() + shared + scan + self.out.flops()

    def state_shapes(self) -> list[tuple[int, ...]]:
        past, state_size, head_dim = self.config.conv_width - 1, self.config.state_size, self.config.head_dim
        local_inner = self.local_heads * head_dim
        shared = 2 * self.local_groups * state_size
        return [(past, local_inner), (past, shared), (self.local_heads, state_size, head_dim)]


MIXER = Mamba2
