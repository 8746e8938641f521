"""Gated linear unit, the channel mixer; without an activation it is TransNormerLLM's SGLU."""

from __future__ import annotations

from torch import Tensor, nn

from megalin.layers.mixer_configs.glu import GLUConfig
from megalin.layers.mixers.base import BuildContext, Mixer, MixerContext, MixerOutput, State
from megalin.layers.norms import SRMSNorm
from megalin.ops.decoding.few_rows import normed_glu
from megalin.ops.dispatch.overrides import bypasses
from megalin.parallel.linear import ColumnParallelLinear, RowParallelLinear
from megalin.parallel.tensor_parallel import local


class GLU(Mixer):
    """y = (act(x W_1) * (x W_2)) W_3, optionally with biases (TransNormerLLM eq. 5 with act = identity)."""

    def __init__(self, config: GLUConfig, scope: BuildContext) -> None:
        super().__init__()
        self.activation = config.activation
        size, tp, std = config.intermediate_size, scope.tp, scope.init_std
        name = f"{scope.path}.intermediate_size"
        bias = config.bias
        self.up = ColumnParallelLinear(scope.hidden_size, size, parts=2, bias=bias, tp=tp, std=std, name=name)
        self.down = RowParallelLinear(size, scope.hidden_size, bias=bias, tp=tp, std=scope.output_std, name=name)

    def forward(self, x: Tensor, context: MixerContext, state: State | None) -> MixerOutput:
        product, rows = self.up.gated(x, self.activation)
        return MixerOutput(self.down.forward_quantized(product, rows), ())

    def step(self, x: Tensor, context: MixerContext, state: State) -> MixerOutput:
        return self(x, context, state)

    @bypasses("forward", "step", up=ColumnParallelLinear, down=RowParallelLinear)
    def add_step(
        self, residual: Tensor, x: Tensor, norm: nn.Module, context: MixerContext, state: State
    ) -> MixerOutput:
        joins = (
            self.down.joins_addition
            and self.up.bias is None
            and self.up.float8 is None
            and residual.dtype == context.compute_dtype
        )
        if not joins or type(norm) is not SRMSNorm:
            return super().add_step(residual, x, norm, context, state)
        weight = local(self.up.weight).flatten(0, 1)
        return MixerOutput(
            self.down.add_to(residual, normed_glu(x, weight, eps=norm.eps, activation=self.activation)), ()
        )

    def flops(self, length: int) -> int:
        return self.up.flops() + self.down.flops()


MIXER = GLU
