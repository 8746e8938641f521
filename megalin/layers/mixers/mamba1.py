"""Mamba-1's token mixer: a recurrence of every channel with states whose decay is selected by the input."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from megalin.layers.gates import MixerGates
from megalin.layers.halo import entering_inputs
from megalin.layers.mixer_configs.mamba1 import Mamba1Config
from megalin.layers.mixers.base import BuildContext, FullPrecision, Mixer, MixerContext, MixerOutput, State
from megalin.layers.short_conv import ShortConv
from megalin.ops.decoding.few_rows import few_row_linear
from megalin.ops.dispatch.dtypes import compute_dtype
from megalin.ops.dispatch.overrides import bypasses
from megalin.ops.scans.selective_scan import selective_scan, selective_step
from megalin.parallel.initialisation import Initializer, constant, normal, uniform
from megalin.parallel.linear import ColumnParallelLinear, RowParallelLinear
from megalin.parallel.tensor_parallel import TensorParallel, local


class ChannelRates(FullPrecision):
    """A_log [M, N], the bias of the time step [M] and the feed-through D [M], channels split over the axis."""

    def __init__(self, inner: int, state_size: int, tp: TensorParallel) -> None:
        super().__init__()
        self.a_log = tp.parameter(inner, state_size, shard_dim=0)
        self.step_bias = tp.parameter(inner, shard_dim=0)
        self.feed_through = tp.parameter(inner, shard_dim=0)

    def init_weights(self, initializer: Initializer) -> None:
        """A of state n is -n, from 1; softplus(bias) log-uniform in [0.001, 0.1]; D one."""
        rates = torch.arange(1, self.a_log.shape[1] + 1, dtype=torch.float32).log()
        initializer(self.a_log, "a_log", constant(rates))
        initializer(self.step_bias, "step_bias", _step_bias)
        initializer(self.feed_through, "feed_through", constant(1.0))

    def forward(self) -> tuple[Tensor, ...]:
        return tuple(local(p).clone() for p in (self.a_log, self.step_bias, self.feed_through))


def _step_bias(full: Tensor, generator: torch.Generator) -> None:
    full.uniform_(math.log(1e-3), math.log(1e-1), generator=generator).exp_()
    full.add_((-torch.expm1(-full)).log())  # the inverse of softplus


class _ScanInputs(NamedTuple):
    """Inputs of the scan of this rank's channels, and of the output projection."""

    q: Tensor  # [B, T, N]
    k: Tensor  # [B, T, N]
    x: Tensor  # [B, T, M/tp]
    step: Tensor  # [B, T, M/tp]
    rates: Tensor  # [M/tp, N]
    gate: Tensor  # [B, T, M/tp]
    conv_state: Tensor  # [B, taps - 1, M/tp]


class Mamba1(Mixer):
    """y = ((o + D x') silu(z)) W_out of width M, twice the hidden size; a block needs no channel mixer.

        [x | z] = X W_xz,  x' = silu(conv(x)),  [r | B | C] = x' W_selection,  dt = softplus(r W_step + b)
        o = selective_scan(C, B, x', dt, -exp(A_log)), N states a channel, all channels reading the same B and C

    Tensor parallel over channels. The R numbers of r and the 2 N of B and C are sums over all channels, and every
    channel reads them: one small fp32 all-reduce forward, one of their gradients backward.

    Source: Mamba section 3.
    """

    def __init__(self, config: Mamba1Config, scope: BuildContext) -> None:
        super().__init__()
        self.config, self.tp, self.cp, self.std = config, scope.tp, scope.cp, scope.init_std
        width, tp = scope.hidden_size, scope.tp
        self.inner = 2 * width
        self.rank = -(-width // 16) if config.step_rank is None else config.step_rank
        name = f"the inner width of {scope.path}, twice model.hidden_size,"
        self.local_inner = tp.divide(self.inner, name)
        self.xz = ColumnParallelLinear(width, self.inner, parts=2, tp=tp, std=self.std, name=name)
        self.conv = ShortConv(self.inner, config.conv_width, tp=tp, name=name)
        self.selection = tp.parameter(self.rank + 2 * config.state_size, self.inner, shard_dim=1)
        self.time_step = tp.parameter(self.inner, self.rank, shard_dim=0)
        self.full_precision = ChannelRates(self.inner, config.state_size, tp)
        self.out = RowParallelLinear(self.inner, width, tp=tp, std=scope.output_std, name=name)

    def init_weights(self, initializer: Initializer) -> None:
        """Draws the matrix of r, B and C from N(0, std^2), that of the time step uniformly within 1 / sqrt(R)."""
        initializer(self.selection, "selection", normal(self.std))
        initializer(self.time_step, "time_step", uniform(1.0 / math.sqrt(self.rank)))

    def forward(self, x: Tensor, context: MixerContext, state: State | None) -> MixerOutput:
        inputs = self._scan_inputs(x, context, state[0] if state else None)
        scan = selective_scan(
            inputs.q,
            inputs.k,
            inputs.x,
            inputs.step,
            inputs.rates,
            initial_state=state[1] if state else None,
            shard=self.cp.sequence_shard(context.documents.shard),
            state_gradient=False,
            document_ids=context.documents.ids,
        )
        y = self._output(scan.output, inputs, context)
        return MixerOutput(y, () if state is None else (inputs.conv_state, scan.state))

    @bypasses("forward")
    def step(self, x: Tensor, context: MixerContext, state: State) -> MixerOutput:
        inputs = self._scan_inputs(x, context, state[0])
        q, k, v, step = (y[:, 0] for y in (inputs.q, inputs.k, inputs.x, inputs.step))
        scan = selective_step(q, k, v, step, inputs.rates, state[1], in_place=context.in_place)
        return MixerOutput(self._output(scan.output[:, None], inputs, context), (inputs.conv_state, scan.state))

    def gate_values(self, x: Tensor, context: MixerContext) -> MixerGates:
        """-exp(A_log) dt, N numbers a channel, and dt."""
        inputs = self._scan_inputs(x, context, None)
        step = inputs.step[..., None]  # [B, T, M/tp, 1]
        return MixerGates(inputs.rates * step, gates={"time_step": step})

    def _scan_inputs(self, x: Tensor, context: MixerContext, conv_state: Tensor | None) -> _ScanInputs:
        x, gate = self.xz(x, gather_input=True)  # [B, T, M/tp]
        if conv_state is None:
            conv_state = entering_inputs(x, context, self.cp, taps=self.config.conv_width)
        conv = self.conv(x, state=conv_state, document_ids=context.documents.ids)
        wide, size = compute_dtype(x), self.config.state_size
        # In fp32, since exponentials follow.
        selected = self.tp.all_reduce_both(few_row_linear(conv.output, local(self.selection)).to(wide))
        code, k, q = selected.to(x.dtype).split([self.rank, size, size], dim=-1)
        a_log, step_bias, _ = context.full_precision
        step = functional.softplus(few_row_linear(code, local(self.time_step)).to(wide) + step_bias)
        return _ScanInputs(q, k, conv.output, step, -torch.exp(a_log), gate, conv.state)

    def _output(self, scanned: Tensor, inputs: _ScanInputs, context: MixerContext) -> Tensor:
        """The scan's output [B, T, M/tp] -> y in the layout of the residual stream."""
        wide = compute_dtype(scanned)
        y = scanned.to(wide) + context.full_precision[2] * inputs.x.to(wide)
        return self.out((y * functional.silu(inputs.gate.to(wide))).to(scanned.dtype))

    def flops(self, length: int) -> int:
        """The scan has no matmul: its 5 N or so operations a channel are elementwise."""
        small = 2 * self.inner * (2 * self.rank + 2 * self.config.state_size)
        return self.xz.flops() + small + self.out.flops()

    def state_shapes(self) -> list[tuple[int, ...]]:
        return [(self.config.conv_width - 1, self.local_inner), (self.local_inner, self.config.state_size)]


MIXER = Mamba1
