"""Rodimus' token mixer: one wide head with data-dependent tempered selection of decay and input."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from megalin.layers.decay import draw_step_bias
from megalin.layers.gates import MixerGates
from megalin.layers.halo import entering_inputs
from megalin.layers.mixer_configs.rodimus import RodimusConfig
from megalin.layers.mixers.base import BuildContext, FullPrecision, Mixer, MixerContext, MixerOutput, State
from megalin.layers.short_conv import ShortConv
from megalin.ops.dispatch.dtypes import compute_dtype
from megalin.ops.dispatch.overrides import bypasses, unchanged
from megalin.ops.dispatch.projection_part import ProjectionPart
from megalin.ops.gates.ddts_gates import ddts_gates
from megalin.ops.gates.low_rank_gate import low_rank_gate
from megalin.ops.scans.fixed_decay import decay_scan_flops
from megalin.ops.scans.projected_conv import projected_conv
from megalin.ops.scans.short_conv import ShortConvOutput
from megalin.ops.scans.vector_decay import vector_decay_scan
from megalin.ops.scans.vector_decay_step import vector_decay_step
from megalin.parallel.initialisation import Initializer, constant, uniform
from megalin.parallel.linear import ColumnParallelLinear, NormedRowParallelLinear, Skip
from megalin.parallel.tensor_parallel import TensorParallel, local

GAIN = 2.0**-2.5
"""Xavier gain of the matrices that the gates, the queries and the keys come from."""
WIDTH_MULTIPLE = 8


class GateVectors(FullPrecision):
    """The bias [n or 2 n] of the selection and temperature gates, replicated, where there are any, and the feed-through
    D [m], sharded."""

    def __init__(self, state_size: int, num_gates: int, inner: int, tp: TensorParallel) -> None:
        super().__init__()
        self.state_size = state_size
        self.gate_bias = tp.parameter(num_gates * state_size, shard_dim=None) if num_gates else None
        self.feed_through = tp.parameter(inner, shard_dim=0)

    def init_weights(self, initializer: Initializer) -> None:
        """softplus(bias) log-uniform in [0.001, 0.1] for the selection, sigmoid(bias) uniform in [1/16, 0.9] for the
        temperature; D is one."""
        if self.gate_bias is not None:
            initializer(self.gate_bias, "gate_bias", self._draw_gate_bias)
        initializer(self.feed_through, "feed_through", constant(1.0))

    def forward(self) -> tuple[Tensor, ...]:
        """The feed-through, then the bias where there is one."""
        vectors = (self.feed_through,) if self.gate_bias is None else (self.feed_through, self.gate_bias)
        return tuple(local(vector).clone() for vector in vectors)

    def _draw_gate_bias(self, full: Tensor, generator: torch.Generator) -> None:
        selection, *temperature = full.split(self.state_size)
        draw_step_bias(selection, generator)
        for bias in temperature:
            bias.copy_(bias.uniform_(1 / 16, 0.9, generator=generator).logit())


class _ScanInputs(NamedTuple):
    """Inputs of the scan of this rank's value channels, and of the output projection."""

    q: Tensor  # [B, T, 1, N]
    k: Tensor  # [B, T, 1, N]
    v: Tensor  # [B, T, 1, M/tp]
    log_decay: Tensor  # [B, T, 1, N]
    x_conv: Tensor  # [B, T, M/tp]
    gate: Tensor | ProjectionPart  # [B, T, M/tp]
    conv_state: tuple[Tensor, ...]  # [B, taps - 1, M/tp]; empty where none was given


class Rodimus(Mixer):
    """y = RMSNorm((o + D x') silu(g)) W_out of width m = 2 D; a block needs no channel mixer.

        [x | g] = X W_fc,  x' = conv(x),  [q | k] = x' W_qk,  [a | t] = x' W_gates + b
        log alpha, k^ = gates(a, t, k) (ops/gates/ddts_gates.py),  v^ = sigmoid(x W_1 W_2 + b_2) x
        o = scan(q, k^, v^; log alpha) / sqrt(n), one head with K = n and V = m

    The config can leave out gates and take q and k from x.

    Tensor parallel over m, by any divisor. The 4 n numbers of q, k, a, t and the l of x W_1 are sums over m, so each
    forward adds them in one small fp32 all-reduce; every rank then evaluates the gates. Backward, the gradients of q,
    k^, log alpha and x W_1 are all-reduced once, before the gates.

    Source: Rodimus section 3.
    """

    def __init__(self, config: RodimusConfig, scope: BuildContext) -> None:
        super().__init__()
        self.config, self.tp, self.cp = config, scope.tp, scope.cp
        width, n, tp = scope.hidden_size, config.state_size, scope.tp
        self.inner = -(-2 * width // WIDTH_MULTIPLE) * WIDTH_MULTIPLE
        self.num_gates = len({"selection", "temperature"} & set(config.gates))
        self.rank = 0
        if "input" in config.gates:
            self.rank = max(width // 64, 16) if config.input_gate_rank is None else config.input_gate_rank
        name = f"the inner width of {scope.path}, twice model.hidden_size,"
        self.local_inner = tp.divide(self.inner, name)
        self.fc = ColumnParallelLinear(width, self.inner, parts=2, tp=tp, std=scope.init_std, name=name)
        self.conv = ShortConv(self.inner, config.conv_width, tp=tp, name=name)
        self.qk = tp.parameter(2 * n, self.inner, shard_dim=1)
        self.gates = tp.parameter(self.num_gates * n, self.inner, shard_dim=1) if self.num_gates else None
        if self.rank:
            self.input_gate_down = tp.parameter(self.rank, self.inner, shard_dim=1)
            self.input_gate_up = tp.parameter(self.inner, self.rank, shard_dim=0)
            self.input_gate_bias = tp.parameter(self.inner, shard_dim=0)
        self.full_precision = GateVectors(n, self.num_gates, self.inner, tp)
        self.out = NormedRowParallelLinear(
            self.inner, width, eps=config.norm_eps, tp=tp, std=scope.output_std, name=name, norm="rmsnorm"
        )

    def init_weights(self, initializer: Initializer) -> None:
        """Xavier-uniform matrices, each of the fused ones by its whole shape; a bias of zero."""
        for name in ("qk", "gates", "input_gate_down", "input_gate_up"):
            parameter = getattr(self, name, None)
            if parameter is not None:
                initializer(parameter, name, uniform(GAIN * math.sqrt(6.0 / sum(parameter.shape))))
        if self.rank:
            initializer(self.input_gate_bias, "input_gate_bias", constant(0.0))

    def forward(self, x: Tensor, context: MixerContext, state: State | None) -> MixerOutput:
        inputs = self._scan_inputs(x, context, state[0] if state else None)
        k, v, log_decay = inputs.k, inputs.v, inputs.log_decay
        scan = vector_decay_scan(
            inputs.q,
            k,
            v,
            log_decay,
            scale=self.config.scale,
            initial_state=state[1] if state else None,
            shard=self.cp.sequence_shard(context.documents.shard),
            state_gradient=False,
            document_ids=context.documents.ids,
            chunk_size=self.config.chunk_size,
        )
        y = self._output(scan.output, inputs, context)
        return MixerOutput(y, () if state is None else (*inputs.conv_state, scan.state))

    @bypasses("forward")
    def step(self, x: Tensor, context: MixerContext, state: State) -> MixerOutput:
        inputs = self._scan_inputs(x, context, state[0])
        q, k, v, log_decay = (y[:, 0] for y in (inputs.q, inputs.k, inputs.v, inputs.log_decay))
        scale, in_place = self.config.scale, context.in_place
        scan = vector_decay_step(q, k, v, log_decay, state[1], scale=scale, in_place=in_place)
        return MixerOutput(self._output(scan.output[:, None], inputs, context), (*inputs.conv_state, scan.state))

    def gate_values(self, x: Tensor, context: MixerContext) -> MixerGates:
        """log alpha [B, T, 1, N]; g, tau and g^tau of the keys, and beta-hat of the values, [B, T, 1, M/tp]."""
        x, _ = self.fc(x, gather_input=True)
        logits = self._logits(x, _convolved(self, x, context, None).output)
        strength, temperature = self._gate_logits(logits, context.full_precision[1:])
        gates = {}
        if strength is not None:
            gates["selection"] = functional.softplus(strength)
        if temperature is not None:
            gates["temperature"] = torch.sigmoid(temperature)
            gates["tempered_selection"] = gates["selection"] ** gates["temperature"]
        if self.rank:
            up, bias = (local(p) for p in (self.input_gate_up, self.input_gate_bias))
            gates["input"] = torch.sigmoid(functional.linear(logits["code"].to(up.dtype), up, bias))
        selected = ddts_gates(strength, temperature, logits["qk"].chunk(2, dim=-1)[1])
        return MixerGates(
            selected.log_decay[:, :, None], gates={name: gate[:, :, None] for name, gate in gates.items()}
        )

    def _scan_inputs(self, x: Tensor, context: MixerContext, conv_state: Tensor | None) -> _ScanInputs:
        joins = conv_state is None and context.documents.shard is None
        if joins and unchanged(self.conv, ShortConv):
            return self._joined_scan_inputs(x, context)
        x, gate = self.fc(x, gather_input=True)  # [B, T, M/tp]
        conv = _convolved(self, x, context, conv_state)
        return self._selected(x, x, conv.output, gate, context, (conv.state,))

    @bypasses()
    def _joined_scan_inputs(self, x: Tensor, context: MixerContext) -> _ScanInputs:
        """Those of a full sequence from its start: both halves' gradients are written as one."""
        reads_logits = self.rank > 0 or self.config.query_key_input != "convolved"
        conv = projected_conv(
            self.fc(x, gather_input=True, split_parts=False),
            local(self.conv.weight),
            local(self.conv.bias),
            part=0,
            readers=1 + reads_logits,
            document_ids=context.documents.ids,
        )
        return self._selected(conv.inputs[0], conv.inputs[-1], conv.output, conv.other, context, ())

    def _selected(
        self,
        x: Tensor,
        x_logits: Tensor,
        x_conv: Tensor,
        gate: Tensor | ProjectionPart,
        context: MixerContext,
        conv_state: tuple[Tensor, ...],
    ) -> _ScanInputs:
        """Inputs of the scan from x [B, T, M/tp], once for the values and once for the logits, and x'."""
        q, k, log_decay, code = self._contracted(x_logits, x_conv, context.full_precision[1:])
        v = x
        if self.rank:
            # Recomputing v in the backward, one pass over x, costs less than keeping it.
            v = checkpoint(
                low_rank_gate,
                x,
                code.to(x.dtype),
                local(self.input_gate_up),
                local(self.input_gate_bias),
                use_reentrant=False,
                preserve_rng_state=False,
            )
        q, k, v, log_decay = (y[:, :, None] for y in (q, k, v, log_decay))  # one head
        return _ScanInputs(q, k, v, log_decay, x_conv, gate, conv_state)

    def _logits(self, x: Tensor, x_conv: Tensor) -> dict[str, Tensor]:
        """[q | k] [B, T, 2 N], the gates before their bias, and the code x W_1 [B, T, L], in full on every rank, in at
        least fp32."""
        n, wide = self.config.state_size, compute_dtype(x)
        of_conv = [] if self.gates is None else [self.gates]
        of_x = [self.input_gate_down] if self.rank else []
        (of_conv if self.config.query_key_input == "convolved" else of_x).insert(0, self.qk)
        # One matmul an input: its gradient is written once, at the width of the input.
        parts = [
            functional.linear(source, torch.cat([local(w) for w in weights]) if weights[1:] else local(weights[0]))
            for source, weights in ((x_conv, of_conv), (x, of_x))
            if weights
        ]
        # In fp32, since exponentials follow.
        whole = self.tp.all_reduce_forward(torch.cat([part.to(wide) for part in parts], dim=-1))  # [B, T, 4 N + L]
        sizes = {"qk": 2 * n, "gates": self.num_gates * n, "code": self.rank}
        names = ("qk", "gates", "code") if self.config.query_key_input == "convolved" else ("gates", "qk", "code")
        return dict(zip(names, whole.split([sizes[name] for name in names], dim=-1), strict=True))

    def _gate_logits(
        self, logits: Mapping[str, Tensor], gate_bias: tuple[Tensor, ...]
    ) -> tuple[Tensor | None, Tensor | None]:
        """a and t of `ddts_gates`, [B, T, N], where there are such gates."""
        if not gate_bias:
            return None, None
        gates = logits["gates"]
        strength, *tempering = (gates + gate_bias[0].to(gates.dtype)).split(self.config.state_size, dim=-1)
        return strength, tempering[0] if tempering else None

    def _contracted(self, x: Tensor, x_conv: Tensor, gate_bias: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """q, k^, log alpha [B, T, N] and x W_1 [B, T, L], in full on every rank, in at least fp32."""
        n, logits = self.config.state_size, self._logits(x, x_conv)
        q, k = logits["qk"].chunk(2, dim=-1)
        selected = ddts_gates(*self._gate_logits(logits, gate_bias), k)
        shared = torch.cat([q, selected.key, selected.log_decay, logits["code"]], dim=-1)  # [B, T, 3 N + L]
        q, k, log_decay, code = self.tp.all_reduce_gradient(shared).split([n, n, n, self.rank], dim=-1)
        return q, k, log_decay, code

    def _output(self, scan: Tensor, inputs: _ScanInputs, context: MixerContext) -> Tensor:
        """scan [B, T, 1, M/tp] -> y in the layout of the residual stream."""
        y: Tensor = self.out(scan.squeeze(2), inputs.gate, skip=Skip(inputs.x_conv, context.full_precision[0]))
        return y

    def flops(self, length: int) -> int:
        scan = decay_scan_flops(
            length,
            num_heads=1,
            key_dim=self.config.state_size,
            value_dim=self.inner,
            chunk_size=self.config.chunk_size,
        )
        small = 2 * self.inner * ((2 + self.num_gates) * self.config.state_size + 2 * self.rank)
        return self.fc.flops() + small + scan + self.out.flops()

    def state_shapes(self) -> list[tuple[int, ...]]:
        taps, width = self.config.conv_width, self.local_inner
        return [(taps - 1, width), (1, self.config.state_size, width)]


def _convolved(mixer: Rodimus, x: Tensor, context: MixerContext, state: Tensor | None) -> ShortConvOutput:
    """x' [B, T, M/tp], and the last inputs."""
    if state is None:
        state = entering_inputs(x, context, mixer.cp, taps=mixer.config.conv_width)
    convolved: ShortConvOutput = mixer.conv(x, state=state, document_ids=context.documents.ids)
    return convolved


MIXER = Rodimus
