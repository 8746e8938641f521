"""The feed-forward network of the Transformer, a channel mixer without a gate."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, Literal, Self

import pydantic
from torch import Tensor
from torch.nn import functional

from megalin.layers.mixers.base import BuildContext, Mixer, MixerConfig, MixerContext, MixerOutput, State
from megalin.parallel.linear import ColumnParallelLinear, RowParallelLinear

ActivationName = Literal["gelu", "gelu_tanh", "relu", "silu", "squared_relu"]


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


class FFNConfig(MixerConfig):
    """The channel mixer of the Transformer and of BERT, two matrices and an activation."""

    attends_to: ClassVar[Literal["earlier", "all", "itself"]] = "itself"
    supports_context_parallel: ClassVar[bool] = True
    type: Literal["ffn"] = "ffn"
    """This mixer."""
    intermediate_size: int = pydantic.Field(gt=0)
    """Width between the two projections."""
    activation: ActivationName = "gelu"
    """Applied between them. gelu: with the error function; gelu_tanh: its approximation. squared_relu: relu(x)^2."""
    bias: bool = True
    """True: both projections have biases."""

    def shrink_for_verify(self, *, hidden_size: int, num_heads: int) -> Self:
        return self.model_copy(update={"intermediate_size": hidden_size + num_heads})

    def build(self, scope: BuildContext) -> FFN:
        return FFN(self, scope)


CONFIG = FFNConfig
