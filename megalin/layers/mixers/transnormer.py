"""TransNormerLLM's token mixer: gated linear attention with a fixed decay and a full-rank linear gate.

Without decay and gate it is TransNormer's NormAttention.
"""

from __future__ import annotations

from torch import Tensor

from megalin.layers.linear_attention import LinearAttention
from megalin.layers.mixer_configs.transnormer import TransNormerConfig
from megalin.layers.mixers.base import BuildContext
from megalin.parallel.linear import ColumnParallelLinear


class TransNormer(LinearAttention):
    """[q | k | v | u] = x W_qkvu; y = (SRMSNorm(scan(silu(q), silu(k), v)) * u) W_o (TransNormerLLM eq. 3-4)."""

    projects_linearly = True

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

    def projection_flops(self) -> int:
        return self._projection().flops()

    def _projection(self) -> ColumnParallelLinear:
        return self.qkvu if self.gated else self.qkv


MIXER = TransNormer
