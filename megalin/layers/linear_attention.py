"""Gated linear attention with a fixed decay or none: the base of the TransNormerLLM, TNL and cosFormer2 mixers."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megalin.errors import ConfigError
from megalin.layers.absolute_positions import AbsolutePositions
from megalin.layers.choices import DecayTable
from megalin.layers.decay import decay_slopes
from megalin.layers.gates import MixerGates
from megalin.layers.linear_attention_config import LinearAttentionConfig, LowRankGatedConfig, PositionedAttentionConfig
from megalin.layers.lrpe_segments import LRPESegments
from megalin.layers.mixers.base import BuildContext, Mixer, MixerContext, MixerOutput, State
from megalin.layers.norms import build_norm
from megalin.layers.positions import LRPEFrequencies, key_dim
from megalin.ops.decoding.gated_steps import NormedInput, gated_decay_step
from megalin.ops.dispatch.overrides import bypasses
from megalin.ops.norms.layer_norm import GateActivation
from megalin.ops.positions.activated_lrpe import activated_lrpe
from megalin.ops.scans.driver import fold
from megalin.ops.scans.fixed_decay import decay_scan, decay_scan_flops
from megalin.ops.scans.fixed_decay_step import decay_step
from megalin.ops.scans.transition import DiagonalDecay
from megalin.parallel.initialisation import Initializer
from megalin.parallel.linear import ColumnParallelLinear, LowRankLinear, NormedRowParallelLinear

SEGMENT_CHUNKS = 2
"""Chunks a segment of LRPE, which counts positions from each segment's middle. The rounding error of the frequencies'
gradient grows with it, the memory of the states between segments with its inverse."""


class Projections(NamedTuple):
    """Inputs of the scan, and the output gate."""

    q: Tensor
    """[B, T, H/tp, K]."""
    k: Tensor
    v: Tensor
    """[B, T, H/tp, V]."""
    gate: Tensor | None
    """[B, T, D/tp]; None without an output gate."""


class LinearAttention(Mixer):
    """y = (SRMSNorm(O) * gate) W_o, O = scan(LRPE(silu(q)), LRPE(silu(k)), v), the norm over all heads together.

    A subclass defines the projection of the normed input to q, k, v and the gate, and the decay: a table of fixed
    ones, or None for a plain sum.
    """

    slopes: Tensor | None
    gate_activation: GateActivation = "none"
    """Activation of the gate that is left to the output's norm."""

    def __init__(
        self, config: LinearAttentionConfig, scope: BuildContext, *, decay: DecayTable | None, gated: bool
    ) -> None:
        super().__init__()
        self.config, self.scope, self.decay, self.gated = config, scope, decay, gated
        self.tp, self.cp = scope.tp, scope.cp
        head_dim, remainder = divmod(scope.hidden_size, config.num_heads)
        if remainder or (config.lrpe == "rotation" and head_dim % 2):
            raise ConfigError(
                f"{scope.path}.num_heads = {config.num_heads} does not divide model.hidden_size = {scope.hidden_size} "
                f"into heads of an even width; choose a divisor"
            )
        self.local_heads = scope.tp.divide(config.num_heads, f"{scope.path}.num_heads")
        self.head_dim, self.key_dim = head_dim, key_dim(config.lrpe, head_dim)
        if config.lrpe is not None:
            self.full_precision = LRPEFrequencies(config.lrpe, config.num_heads, head_dim, tp=scope.tp)
        self.out = NormedRowParallelLinear(
            scope.hidden_size,
            scope.hidden_size,
            eps=config.norm_eps,
            tp=scope.tp,
            std=scope.output_std,
            name="model.hidden_size",
            norm=config.output_norm,
        )
        slopes = None if decay is None else torch.empty(self.local_heads, device="meta")
        self.register_buffer("slopes", slopes, persistent=False)

    @classmethod
    def input_layer(cls, config: Any, scope: BuildContext) -> Mixer | None:
        """The absolute positions of a mixer that can add them."""
        if not isinstance(config, PositionedAttentionConfig) or config.absolute_positions == "none":
            return None
        return AbsolutePositions(config.max_positions, scope)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """The residual stream [B, T or T/tp, D] -> q | k | v of this rank's heads, concatenated [B, T, 3 D/tp], and the
        gate [B, T, D/tp]; None without a gate, or where it is the fourth part, after v."""
        raise NotImplementedError

    def unnormed_input(self, x: Tensor, norm: nn.Module) -> NormedInput | None:
        """x [B, 1, D] where `add_step` may project it without its norm, whose scale it applies later; else None."""
        return None

    def projection_flops(self) -> int:
        """Forward floating-point operations a token of `project`."""
        raise NotImplementedError

    def init_weights(self, initializer: Initializer) -> None:
        """Sets this layer's decays."""
        if self.decay is None or self.slopes is None:
            return
        place, num_heads = self.scope, self.config.num_heads
        table = decay_slopes(self.decay, layer=place.layer, num_layers=place.num_layers, num_heads=num_heads)
        self.slopes.copy_(self.tp.local_slice(table, dim=0))

    def forward(self, x: Tensor, context: MixerContext, state: State | None) -> MixerOutput:
        by_segments = state is None and context.consecutive and type(self)._heads is LinearAttention._heads
        if by_segments and self.config.lrpe is not None and self.slopes is not None:
            output, gate = self._by_segments(x, context)
            return MixerOutput(self._output(output.flatten(2), gate), ())
        q, k, v, gate = self._heads(x, context, context.positions)
        scan = decay_scan(
            q,
            k,
            v,
            self.slopes,
            initial_state=state[0] if state else None,
            shard=self.cp.sequence_shard(context.documents.shard),
            state_gradient=False,
            document_ids=context.documents.ids,
            chunk_size=self.config.chunk_size,
        )
        return MixerOutput(self._output(scan.output.flatten(2), gate), () if state is None else (scan.state,))

    @bypasses("forward")
    def step(self, x: Tensor, context: MixerContext, state: State) -> MixerOutput:
        q, k, v, gate = self._heads(x, context, context.positions)
        scan = decay_step(q[:, 0], k[:, 0], v[:, 0], self.slopes, state[0], in_place=context.in_place)
        return MixerOutput(self._output(scan.output.flatten(1)[:, None], gate), (scan.state,))

    @bypasses("forward", "step", "_heads", "_output", out=NormedRowParallelLinear)
    def add_step(
        self, residual: Tensor, x: Tensor, norm: nn.Module, context: MixerContext, state: State
    ) -> MixerOutput:
        fused = self.gated and self.config.activation == "silu"
        if not fused or not self.out.joins_addition or residual.dtype != context.compute_dtype:
            return super().add_step(residual, x, norm, context, state)
        unnormed = self.unnormed_input(x, norm)
        parts, gate = self.project(norm(x) if unnormed is None else x)
        (theta,) = context.full_precision or (None,)
        step = gated_decay_step(
            parts[:, 0].unflatten(-1, (-1, self.local_heads, self.head_dim)),
            state[0],
            self.slopes,
            gate=None if gate is None else gate[:, 0],
            theta=theta,
            positions=context.positions[:, 0],
            form=self.config.lrpe,
            unnormed=unnormed,
            in_place=context.in_place,
        )
        y = self.out.add_normed_to(residual, step.product[:, None], step.squares[:, None])
        return MixerOutput(y, (step.state,))

    def _output(self, heads: Tensor, gate: Tensor | None) -> Tensor:
        """The norm, the gate and W_o of the scan's output: [B, T, D/tp] -> [B, T, D]."""
        return self.out(heads, gate, gate_activation=self.gate_activation)

    @bypasses()
    def _by_segments(self, x: Tensor, context: MixerContext) -> tuple[Tensor, Tensor | None]:
        """The scan's output [B, T, H/tp, V] and the gate, with LRPE's positions counted from the middle of short
        segments, which keeps the gradient of its frequencies accurate (`ops.positions.lrpe_states`).

        Not for an overridden `_heads`, whose scores may depend on more than differences of positions.
        """
        (theta,), form, length = context.full_precision, self.config.lrpe, context.positions.shape[-1]
        assert form is not None
        assert self.slopes is not None
        tokens = min(length, SEGMENT_CHUNKS * self.config.chunk_size)
        segments = LRPESegments(len(x), length, tokens, theta, form, self.slopes, context.documents.ids)
        q, k, v, gate = self._heads(x, context, segments.positions(x.device))
        cut_k, cut_v = segments.cut(k), segments.cut(v)
        entering = None
        if context.documents.shard is not None or tokens < length:
            added = segments.added(cut_k, cut_v)
            entering = segments.entering(added)
            if context.documents.shard is not None:
                # States travel between ranks in positions of the full sequence.
                origin = self.cp.tokens_before(k) + tokens // 2
                leaving = segments.moved(segments.leaving(k, v, entering), -(origin + length))
                shard = self.cp.sequence_shard(context.documents.shard)
                assert shard is not None
                before = fold(leaving, DiagonalDecay(-length * self.slopes[:, None]), shard)
                entering = segments.entering(added, segments.moved(before, origin))
        output = decay_scan(
            segments.cut(q),
            cut_k,
            cut_v,
            self.slopes,
            initial_state=None if entering is None else entering.flatten(0, 1),
            state_gradient=False,
            document_ids=segments.cut_documents(),
            chunk_size=self.config.chunk_size,
        ).output
        return segments.join(output), gate

    def _heads(self, x: Tensor, context: MixerContext, positions: Tensor) -> Projections:
        """q and k with LRPE at these positions, v, and the gate."""
        parts, gate = self.project(x)
        parts = parts.unflatten(-1, (-1, self.local_heads, self.head_dim))  # [B, T, 3 or 4, H/tp, V]
        (theta,) = context.full_precision or (None,)
        form, activation = self.config.lrpe, self.config.activation
        q, k, v, *rest = activated_lrpe(parts, theta, positions, form=form, activation=activation)
        return Projections(q, k, v, rest[0].flatten(-2) if rest else gate)

    def gate_values(self, x: Tensor, context: MixerContext) -> MixerGates:
        """The fixed decay of each head; zero without decay."""
        slopes = torch.zeros(self.local_heads, device=x.device) if self.slopes is None else self.slopes
        return MixerGates(-slopes[:, None])

    def flops(self, length: int) -> int:
        scan = decay_scan_flops(
            length,
            num_heads=self.config.num_heads,
            key_dim=self.key_dim,
            value_dim=self.head_dim,
            chunk_size=self.config.chunk_size,
        )
        return self.projection_flops() + scan + self.out.flops()

    def state_shapes(self) -> list[tuple[int, ...]]:
        return [(self.local_heads, self.key_dim, self.head_dim)]


class LowRankGatedAttention(LinearAttention):
    """Linear attention with the gate G = sigmoid(x W_down W_up) of rank D / H (TNL, cosFormer2), or without a gate.

    With `gate_input = "residual"` the mixer receives the sub-layer's input and applies its norm itself.
    """

    def __init__(self, config: LowRankGatedConfig, scope: BuildContext, *, decay: DecayTable | None) -> None:
        super().__init__(config, scope, decay=decay, gated=config.gate != "none")
        width, name = scope.hidden_size, "model.hidden_size"
        self.gate_activation = "sigmoid" if config.output_norm == "layernorm" else "none"  # a pass of LayerNorm has it
        self.input_norm = build_norm(config.norm, width, config.norm_eps, scope.tp) if config.norms_input else None
        self.qkv = ColumnParallelLinear(width, width, parts=3, tp=scope.tp, std=scope.init_std, name=name)
        self.gate = (
            LowRankLinear(width, self.head_dim, width, tp=scope.tp, std=scope.init_std, name=name)
            if self.gated
            else None
        )

    def project(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        normed = self._normed(x)
        return self.qkv(normed, split_parts=False), self._gate(x, normed)

    def gate_values(self, x: Tensor, context: MixerContext) -> MixerGates:
        """The fixed decay of each head, and the output gate [B, T, H/tp, V]."""
        gates = super().gate_values(x, context)
        gate = self._gate(x, self._normed(x))
        if gate is not None and self.gate_activation == "sigmoid":
            gate = torch.sigmoid(gate)
        return gates if gate is None else gates._replace(gates={"output": gate.unflatten(-1, (self.local_heads, -1))})

    def _normed(self, x: Tensor) -> Tensor:
        return self.tp.enter(x if self.input_norm is None else self.input_norm(x))

    def _gate(self, x: Tensor, normed: Tensor) -> Tensor | None:
        """[B, T, D/tp], before `gate_activation`; None without a gate."""
        if self.gate is None:
            return None
        gate = self.gate(normed if self.input_norm is None else self.tp.enter(x))
        return gate if self.gate_activation == "sigmoid" else torch.sigmoid(gate)

    def projection_flops(self) -> int:
        return self.qkv.flops() + (0 if self.gate is None else self.gate.flops())
