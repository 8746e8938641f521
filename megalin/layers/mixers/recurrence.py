"""Linear attention with a chosen recurrence: decay, gates of keys and values, positions, widths and short convolution.

It makes the recurrences of Rodimus' Table 4 a config space, GLA and RetNet among them.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from megalin.layers.decay import decay_slopes
from megalin.layers.gates import MixerGates
from megalin.layers.halo import entering_inputs
from megalin.layers.mixer_configs.recurrence import RecurrenceConfig
from megalin.layers.mixers.base import BuildContext, Mixer, MixerContext, MixerOutput, State
from megalin.layers.recurrence_gates import DecayGate, DecayVectors, GateSizes, LowRankGate
from megalin.layers.recurrence_scan import Recurrence
from megalin.ops.dispatch.overrides import bypasses
from megalin.ops.norms.rms_norm import rms_norm
from megalin.ops.norms.srmsnorm import srmsnorm
from megalin.ops.positions.activated_lrpe import one_plus_elu
from megalin.ops.positions.encodings import rope
from megalin.ops.scans.short_conv import short_conv
from megalin.parallel.initialisation import Initializer, constant, uniform
from megalin.parallel.linear import ColumnParallelLinear, RowParallelLinear
from megalin.parallel.tensor_parallel import local


class _ScanInputs(NamedTuple):
    """Inputs of the scan of this rank's heads, and of the output projection."""

    q: Tensor  # [B, T, H/tp, K]
    k: Tensor  # [B, T, H/tp, K]
    v: Tensor  # [B, T, H/tp, V]
    decay: Tensor | None  # [H/tp], [B, T, H/tp] or [B, T, H/tp, K]
    value_decay: Tensor | None  # [B, T, H/tp, V]
    gate: Tensor | None  # [B, T, H V/tp]
    conv_state: tuple[Tensor, ...]  # [B, taps - 1, (2 K + V) H/tp]; empty without a convolution


class RecurrenceMixer(Mixer):
    """y = (norm(o) * act(x W_g)) W_o, o_t = scale S_t^T q_t, S_t = A_t S_{t-1} + (B_t k_t) (B^_t v_t)^T in each head.

    [q | k] = x W_qk of expand_k D channels and v = x W_v of expand_v D, then a short convolution, the activation of q
    and k, and positions. A_t is the decay, B_t and B^_t are gates (`RecurrenceConfig`). The norm is over one head.

    Tensor parallel over heads.

    Source: Rodimus Table 4; GLA; RetNet.
    """

    slopes: Tensor | None

    def __init__(self, config: RecurrenceConfig, scope: BuildContext) -> None:
        super().__init__()
        self.config, self.scope, self.tp, self.cp = config, scope, scope.tp, scope.cp
        width, tp, std, heads = scope.hidden_size, scope.tp, scope.init_std, config.num_heads
        name = f"{scope.path}.num_heads"
        self.key_dim, self.value_dim = config.head_dims(width, scope.path)
        self.local_heads = tp.divide(heads, name)
        self.recurrence = Recurrence(
            config.decay, self.key_dim, self.value_dim, config.scale(self.key_dim), config.chunk_size, config.decay_side
        )
        keys, values = heads * self.key_dim, heads * self.value_dim
        self.projects_keys = config.keys == "projected"
        self.qk = ColumnParallelLinear(width, keys, parts=2 if self.projects_keys else 1, tp=tp, std=std, name=name)
        self.vg = ColumnParallelLinear(
            width, values, parts=1 if config.gate == "none" else 2, tp=tp, std=std, name=name
        )
        self.conv_weights: list[str] = []
        if config.conv_width is not None:
            parts = {"conv_q": keys} | ({"conv_k": keys} if self.projects_keys else {}) | {"conv_v": values}
            for part, size in parts.items():
                self.register_parameter(part, tp.parameter(size, config.conv_width, shard_dim=0))
            self.conv_weights = list(parts)
        rank = config.key_gate_rank
        self.key_gate = None if rank is None else LowRankGate(width, rank, keys, tp=tp, std=std, name=name)
        rank = config.value_gate_rank
        self.value_gate = None if rank is None else LowRankGate(width, rank, values, tp=tp, std=std, name=name)
        self._build_decay()
        self.norm_weight = tp.parameter(self.value_dim, shard_dim=None) if config.head_norm == "rmsnorm" else None
        self.out = RowParallelLinear(values, width, tp=tp, std=scope.output_std, name=name)
        slopes = torch.empty(self.local_heads, device="meta") if config.decay == "fixed" else None
        self.register_buffer("slopes", slopes, persistent=False)

    def _build_decay(self) -> None:
        """Gates of a scalar or vector decay, along keys and values."""
        config, scope = self.config, self.scope
        self.decay_gate = self.value_decay_gate = None
        if config.decay not in ("scalar", "vector"):
            return
        options: dict[str, Any] = {"rank": config.decay_rank, "temperature": config.decay_temperature}
        options |= {"tp": scope.tp, "std": scope.init_std, "name": f"{scope.path}.num_heads"}
        keys = GateSizes(scope.hidden_size, config.num_heads, 1 if config.decay == "scalar" else self.key_dim)
        values = None if config.decay_side == "keys" else keys._replace(channels=self.value_dim)
        form = None if config.decay_side == "values" else config.decay_form
        if form is not None:
            self.decay_gate = DecayGate(form, keys, tied=config.input_gate, **options)
        if values is not None:
            self.value_decay_gate = DecayGate("sigmoid", values, tied="none", **options)
        self.full_precision = DecayVectors(form, keys, values, scope.tp)

    def init_weights(self, initializer: Initializer) -> None:
        """Convolutions uniformly within 1 / sqrt(taps), the norm's weight one, and the table of slopes."""
        for name in self.conv_weights:
            taps = getattr(self, name).shape[1]
            initializer(getattr(self, name), name, uniform(1.0 / math.sqrt(taps)))
        if self.norm_weight is not None:
            initializer(self.norm_weight, "norm_weight", constant(1.0))
        if self.slopes is not None:
            place, heads = self.scope, self.config.num_heads
            kind = self.config.slope_table
            table = decay_slopes(kind, layer=place.layer, num_layers=place.num_layers, num_heads=heads)
            self.slopes.copy_(self.tp.local_slice(table, dim=0))

    def forward(self, x: Tensor, context: MixerContext, state: State | None) -> MixerOutput:
        inputs = self._scan_inputs(x, context, state)
        scan = self.recurrence.scan(
            inputs.q,
            inputs.k,
            inputs.v,
            inputs.decay,
            inputs.value_decay,
            initial_state=state[-1] if state else None,
            shard=self.cp.sequence_shard(context.documents.shard),
            document_ids=context.documents.ids,
        )
        y = self._output(scan.output, inputs.gate)
        return MixerOutput(y, () if state is None else (*inputs.conv_state, scan.state))

    @bypasses("forward")
    def step(self, x: Tensor, context: MixerContext, state: State) -> MixerOutput:
        inputs = self._scan_inputs(x, context, state)
        q, k, v = inputs.q[:, 0], inputs.k[:, 0], inputs.v[:, 0]
        decay = inputs.decay if inputs.decay is None or self.slopes is not None else inputs.decay[:, 0]
        value_decay = None if inputs.value_decay is None else inputs.value_decay[:, 0]
        scan = self.recurrence.step(q, k, v, decay, state[-1], value_decay, in_place=context.in_place)
        return MixerOutput(self._output(scan.output[:, None], inputs.gate), (*inputs.conv_state, scan.state))

    def gate_values(self, x: Tensor, context: MixerContext) -> MixerGates:
        """ln A_t of each head, key, or value where these alone decay; with both, that of values is a gate."""
        if self.config.decay in ("none", "fixed"):
            slopes = torch.zeros(self.local_heads, device=x.device) if self.slopes is None else self.slopes
            return MixerGates(-slopes[:, None])
        inputs = self._scan_inputs(x, context, None)
        found = [each for each in (inputs.decay, inputs.value_decay) if each is not None]
        log_decay = found[0][..., None] if found[0].dim() == 3 else found[0]
        return MixerGates(log_decay, gates={"value_decay": found[1].exp()} if found[1:] else {})

    def _scan_inputs(self, x: Tensor, context: MixerContext, state: State | None) -> _ScanInputs:
        x = self.tp.enter(x)
        (q, *keys), (v, *gates) = self.qk(x), self.vg(x)
        conv_state: tuple[Tensor, ...] = ()
        if self.conv_weights:
            (q, *keys, v), after = self._convolved([q, *keys, v], context, state)
            conv_state = (after,)
        v = v if self.value_gate is None else self.value_gate(x, v)
        q, v = q.unflatten(-1, (self.local_heads, -1)), v.unflatten(-1, (self.local_heads, -1))
        k = keys[0].unflatten(-1, (self.local_heads, -1)) if keys else torch.ones_like(q)
        q = self._positioned(self._activated(q), context)
        k = self._positioned(self._activated(k) if keys else k, context)
        if self.key_gate is not None:
            k = self.key_gate(x, k.flatten(2)).view_as(k)
        decay, value_decay = self.slopes, None
        if self.decay_gate is not None:
            k, decay = self.decay_gate(x, k, context.full_precision)
            decay = decay.squeeze(-1) if self.config.decay == "scalar" else decay
        if self.value_decay_gate is not None:
            _, value_decay = self.value_decay_gate(x, v, context.full_precision[-1:])
        return _ScanInputs(q, k, v, decay, value_decay, gates[0] if gates else None, conv_state)

    def _convolved(
        self, parts: list[Tensor], context: MixerContext, state: State | None
    ) -> tuple[tuple[Tensor, ...], Tensor]:
        """silu of the convolutions of q, k and v, as one, and its last inputs."""
        joined = torch.cat(parts, dim=-1)
        weights = torch.cat([local(getattr(self, name)) for name in self.conv_weights])
        before = state[0] if state else entering_inputs(joined, context, self.cp, taps=weights.shape[1])
        conv = short_conv(joined, weights, None, state=before, document_ids=context.documents.ids)
        return conv.output.split([part.shape[-1] for part in parts], dim=-1), conv.state

    def _activated(self, x: Tensor) -> Tensor:
        if self.config.activation == "1+elu":
            return one_plus_elu(x)
        return functional.silu(x) if self.config.activation == "silu" else x

    def _positioned(self, x: Tensor, context: MixerContext) -> Tensor:
        return x if self.config.positions == "none" else rope(x, context.positions, base=self.config.base)

    def _output(self, o: Tensor, gate: Tensor | None) -> Tensor:
        """The scan's output [B, T, H/tp, V] and the gate -> y in the layout of the residual stream."""
        if self.norm_weight is not None:
            weight = self.tp.all_reduce_gradient(local(self.norm_weight))
            o = rms_norm(o, weight, eps=self.config.norm_eps)
        elif self.config.head_norm == "srmsnorm":
            o = srmsnorm(o, eps=self.config.norm_eps)
        y = o.flatten(2)
        if gate is not None:
            y = y * (functional.silu(gate) if self.config.gate == "silu" else torch.sigmoid(gate))
        return self.out(y)

    def flops(self, length: int) -> int:
        gates = (self.key_gate, self.value_gate, self.decay_gate, self.value_decay_gate)
        projections = self.qk.flops() + self.vg.flops() + sum(gate.flops() for gate in gates if gate is not None)
        return projections + self.recurrence.flops(length, self.config.num_heads) + self.out.flops()

    def state_shapes(self) -> list[tuple[int, ...]]:
        shapes: list[tuple[int, ...]] = []
        if self.config.conv_width is not None:
            keys = 2 * self.key_dim if self.projects_keys else self.key_dim
            shapes.append((self.config.conv_width - 1, self.local_heads * (keys + self.value_dim)))
        return [*shapes, self.recurrence.state_shape(self.local_heads)]


MIXER = RecurrenceMixer
