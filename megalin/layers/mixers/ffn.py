"""The feed-forward network of the Transformer, a channel mixer without a gate."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.nn import functional

from megalin.layers.mixer_configs.ffn import ActivationName, FFNConfig
from megalin.layers.mixers.base import BuildContext, Mixer, MixerContext, MixerOutput, State
from megalin.parallel.linear import ColumnParallelLinear, RowParallelLinear


def _gelu_tanh(x: Tensor) -> Tensor:
    return functional.gelu(x, approximate="tanh")


def _squared_relu(x: Tensor) -> Tensor:
    return functional.relu(x).square()


_ACTIVATIONS: dict[ActivationName, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,
    "gelu_tanh": _gelu_tanh,
    "relu": functional.relu,
    "silu": functional.silu,
    "squared_relu": _squared_relu,
}


class FFN(Mixer):
    """y = act(x W_1 + b_1) W_2 + b_2 (Vaswani et al. 2017 eq. 2; with the exact, erf GELU: Devlin et al. 2019)."""

    def __init__(self, config: FFNConfig, scope: BuildContext) -> None:
        super().__init__()
        self.activation = _ACTIVATIONS[config.activation]
        width, size, tp, bias = scope.hidden_size, config.intermediate_size, scope.tp, config.bias
        name = f"{scope.path}.intermediate_size"
        self.up = ColumnParallelLinear(width, size, bias=bias, tp=tp, std=scope.init_std, name=name)
        self.down = RowParallelLinear(size, width, bias=bias, tp=tp, std=scope.output_std, name=name)

    def forward(self, x: Tensor, context: MixerContext, state: State | None) -> MixerOutput:
        return MixerOutput(self.down(self.activation(self.up(x, gather_input=True, split_parts=False))), ())

    def step(self, x: Tensor, context: MixerContext, state: State) -> MixerOutput:
        return self(x, context, state)

    def flops(self, length: int) -> int:
        return self.up.flops() + self.down.flops()


MIXER = FFN
