"""HGRN2's token mixer: gated linear attention whose key is one minus the forget gate, with lower bounds by layer."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from megalin.errors import ConfigError
from megalin.layers.gates import MixerGates
from megalin.layers.mixer_configs.hgrn2 import HGRN2Config
from megalin.layers.mixers.base import (
    BuildContext,
    FullPrecision,
    Mixer,
    MixerContext,
    MixerOutput,
    SequenceContext,
    State,
)
from megalin.layers.norms import SRMSNorm
from megalin.ops.decoding.gated_steps import NormedInput, gated_vector_step
from megalin.ops.dispatch.overrides import bypasses
from megalin.ops.gates.forget_gate_scan import forget_gate_scan
from megalin.ops.gates.forget_gates import forget_gates
from megalin.ops.scans.fixed_decay import decay_scan_flops
from megalin.ops.scans.vector_decay_step import vector_decay_step
from megalin.parallel.initialisation import Initializer, constant
from megalin.parallel.linear import ColumnParallelLinear, NormedRowParallelLinear
from megalin.parallel.tensor_parallel import TensorParallel, local


class Gamma(FullPrecision):
    """Gamma [L, D], one row a block, columns sharded over the axis."""

    def __init__(self, num_layers: int, hidden_size: int, tp: TensorParallel) -> None:
        super().__init__()
        self.gamma = tp.parameter(num_layers, hidden_size, shard_dim=1)

    def init_weights(self, initializer: Initializer) -> None:
        """Ones: the bounds start as beta^l = l / L."""
        initializer(self.gamma, "gamma", constant(1.0))

    def forward(self) -> tuple[Tensor, ...]:
        return (local(self.gamma).clone(),)


class LowerBounds(nn.Module):
    """beta [L, D/tp]: beta^l = sum over j = 1 .. l of softmax over layers (Gamma)_j, so beta^0 = 0 and beta < 1."""

    def __init__(self, scope: BuildContext) -> None:
        super().__init__()
        self.rows = Gamma(scope.num_layers, scope.hidden_size, scope.tp)

    def forward(self) -> Tensor:
        """The bounds of all blocks, fp32."""
        fractions = self.rows()[0].softmax(0)
        return torch.cat([torch.zeros_like(fractions[:1]), fractions[1:].cumsum(0)])


class HGRN2(Mixer):
    """y = norm(scan(q, 1 - f, v; log f)) W_o with q = silu(x W_q), v = x W_v, f = beta + (1 - beta) sigmoid(x W_f).

    The config chooses other activations of q and v, biases, and no bounds, beta = 0. The scan is the vector-decay
    recurrence with K = V = D / H. 1 - f and log f are evaluated in fp32, on a GPU in the scan's kernels
    (ops/gates/forget_gate_scan.py).

    Source: HGRN2 section 3, with the first bound subtracted.
    """

    def __init__(self, config: HGRN2Config, scope: BuildContext) -> None:
        super().__init__()
        self.config, self.scope, self.tp, self.cp = config, scope, scope.tp, scope.cp
        width, std = scope.hidden_size, scope.init_std
        self.head_dim, remainder = divmod(width, config.num_heads)
        if remainder:
            raise ConfigError(
                f"{scope.path}.num_heads = {config.num_heads} does not divide model.hidden_size = {width}; "
                "choose a divisor"
            )
        self.local_heads = scope.tp.divide(config.num_heads, f"{scope.path}.num_heads")
        self.scale = 1.0 if config.scan_scale == "one" else self.head_dim**-0.5
        name = "model.hidden_size"
        self.qfv = ColumnParallelLinear(width, width, parts=3, bias=config.bias, tp=scope.tp, std=std, name=name)
        self.out = NormedRowParallelLinear(
            width,
            width,
            eps=config.norm_eps if config.output_norm_eps is None else config.output_norm_eps,
            bias=config.bias,
            tp=scope.tp,
            std=scope.output_std,
            name=name,
            norm=config.output_norm,
        )

    @classmethod
    def shared_module(cls, config: HGRN2Config, scope: BuildContext) -> LowerBounds | None:
        """Gamma's cumulative softmax, the lower bounds of all layers."""
        return LowerBounds(scope) if config.lower_bounds == "learned" else None

    def full_precision_tensors(self, context: SequenceContext) -> tuple[Tensor, ...]:
        if self.config.lower_bounds == "none":
            wide = torch.promote_types(context.compute_dtype, torch.float32)
            return (torch.zeros(self.local_heads * self.head_dim, dtype=wide, device=context.positions.device),)
        # Inside the block, the layer's number would compile a graph for each layer.
        return (context.shared[self.config.type][self.scope.layer],)

    def forward(self, x: Tensor, context: MixerContext, state: State | None) -> MixerOutput:
        q, logit, v = self._projections(x)
        (beta,) = context.full_precision  # [D/tp]
        scan = forget_gate_scan(
            q,
            logit,
            v,
            beta.unflatten(0, (self.local_heads, self.head_dim)),
            scale=self.scale,
            initial_state=state[0] if state else None,
            shard=self.cp.sequence_shard(context.documents.shard),
            state_gradient=False,
            document_ids=context.documents.ids,
            chunk_size=self.config.chunk_size,
        )
        return MixerOutput(self.out(scan.output.flatten(2)), () if state is None else (scan.state,))

    @bypasses("forward")
    def step(self, x: Tensor, context: MixerContext, state: State) -> MixerOutput:
        q, k, v, log_decay = (tensor[:, 0] for tensor in gated_heads(*self._projections(x), context))
        scan = vector_decay_step(q, k, v, log_decay, state[0], scale=self.scale, in_place=context.in_place)
        return MixerOutput(self.out(scan.output.flatten(1)[:, None]), (scan.state,))

    @bypasses("forward", "step", "_projections", qfv=ColumnParallelLinear, out=NormedRowParallelLinear)
    def add_step(
        self, residual: Tensor, x: Tensor, norm: nn.Module, context: MixerContext, state: State
    ) -> MixerOutput:
        if not self.out.joins_addition or residual.dtype != context.compute_dtype:
            return super().add_step(residual, x, norm, context, state)
        unnormed = NormedInput(x[:, 0], norm.eps) if type(norm) is SRMSNorm and not self.config.bias else None
        parts = self.qfv(norm(x) if unnormed is None else x, gather_input=True, split_parts=False)
        step = gated_vector_step(
            parts[:, 0].unflatten(-1, (3, self.local_heads, self.head_dim)),
            state[0],
            context.full_precision[0],
            query_activation=self.config.query_activation,
            silu_value=self.config.value_activation == "silu",
            scale=self.scale,
            unnormed=unnormed,
            in_place=context.in_place,
        )
        y = self.out.add_normed_to(residual, step.product[:, None], step.squares[:, None])
        return MixerOutput(y, (step.state,))

    def _projections(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, the forget gate's logit and v, each [B, T, H/tp, K]."""
        q, logit, v = self.qfv(x, gather_input=True)  # [B, T, D/tp]
        q = functional.silu(q) if self.config.query_activation == "silu" else torch.sigmoid(q)
        v = functional.silu(v) if self.config.value_activation == "silu" else v
        q, logit, v = (tensor.unflatten(-1, (self.local_heads, self.head_dim)) for tensor in (q, logit, v))
        return q, logit, v

    def gate_values(self, x: Tensor, context: MixerContext) -> MixerGates:
        """log f, and beta where bounds are learned."""
        (beta,) = context.full_precision
        bounds = None if self.config.lower_bounds == "none" else beta.unflatten(-1, (self.local_heads, -1))
        return MixerGates(gated_heads(*self._projections(x), context)[3], bounds)

    def flops(self, length: int) -> int:
        scan = decay_scan_flops(
            length,
            num_heads=self.config.num_heads,
            key_dim=self.head_dim,
            value_dim=self.head_dim,
            chunk_size=self.config.chunk_size,
        )
        return self.qfv.flops() + scan + self.out.flops()

    def state_shapes(self) -> list[tuple[int, ...]]:
        return [(self.local_heads, self.head_dim, self.head_dim)]


def gated_heads(q: Tensor, logit: Tensor, v: Tensor, context: MixerContext) -> tuple[Tensor, ...]:
    """q, k, v, log f of the projections, each [B, T, H/tp, K]; k in the dtype of x, log f in at least fp32."""
    (beta,) = context.full_precision  # [D/tp]
    k, log_decay = (gate.view_as(logit) for gate in forget_gates(logit.flatten(2), beta))
    return q, k, v, log_decay


MIXER = HGRN2
