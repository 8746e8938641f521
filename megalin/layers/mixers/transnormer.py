"""TransNormerLLM's token mixer: gated linear attention with a fixed decay and a full-rank linear gate.

Without decay and gate it is TransNormer's NormAttention.
"""

from __future__ import annotations

from torch import Tensor, nn

from megalin.layers.linear_attention import LinearAttention
from megalin.layers.mixer_configs.transnormer import TransNormerConfig
from megalin.layers.mixers.base import BuildContext, MixerContext, MixerOutput, State
from megalin.layers.norms import SRMSNorm
from megalin.ops.decoding.gated_steps import NormedInput
from megalin.ops.dispatch.overrides import bypasses
from megalin.parallel.linear import ColumnParallelLinear


class TransNormer(LinearAttention):
    """[q | k | v | u] = x W_qkvu; y = (SRMSNorm(scan(silu(q), silu(k), v)) * u) W_o (TransNormerLLM eq. 3-4)."""

    def __init__(self, config: TransNormerConfig, scope: BuildContext) -> None:
        decay = None if config.decay == "none" else config.decay
        super().__init__(config, scope, decay=decay, gated=config.gate != "none")
        width, tp, std, name = scope.hidden_size, scope.tp, scope.init_std, "model.hidden_size"
        if self.gated:
            self.qkvu = ColumnParallelLinear(width, width, parts=4, tp=tp, std=std, name=name)
        else:
            self.qkv = ColumnParallelLinear(width, width, parts=3, tp=tp, std=std, name=name)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        return self._projection()(x, gather_input=True, split_parts=False), None

    @bypasses("project", "_projection", "unnormed_input", qkvu=ColumnParallelLinear, qkv=ColumnParallelLinear)
    def add_step(
        self, residual: Tensor, x: Tensor, norm: nn.Module, context: MixerContext, state: State
    ) -> MixerOutput:
        return super().add_step(residual, x, norm, context, state)

    def unnormed_input(self, x: Tensor, norm: nn.Module) -> NormedInput | None:
        # `project` is a linear map, with which the scale of the norm commutes.
        return NormedInput(x[:, 0], norm.eps) if type(norm) is SRMSNorm else None

    def projection_flops(self) -> int:
        return self._projection().flops()

    def _projection(self) -> ColumnParallelLinear:
        return self.qkvu if self.gated else self.qkv


MIXER = TransNormer
