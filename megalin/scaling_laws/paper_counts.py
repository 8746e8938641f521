"""Parameters and FLOPs by the formulas of the scaling-laws paper (Shen et al. 2024, Table 1)."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from megalin.errors import ConfigError
from megalin.model.config import ModelConfig


class PaperCounts(NamedTuple):
    """Counts without embeddings; a GLU counts as 8/3 of the width, whatever it is."""

    parameters: float
    flops_per_token: float
    """Forward and backward."""


class _Formula(NamedTuple):
    extra_parameters: Callable[[float, float, float], float]
    """Parameters beyond 12 l d^2, of l layers, width d and h heads."""
    extra_flops: Callable[[float, float, float], float]
    """FLOPs beyond 72 l d^2 a token, over these; of width d, h heads and n tokens a sequence."""


_FORMULAS = {
    "softmax": _Formula(
        lambda layers, d, h: 0.0,
        lambda d, h, n: n / (6 * d) + 5 / (18 * d),
    ),
    "tnl": _Formula(
        lambda layers, d, h: 2 * layers * d**2 / h,
        lambda d, h, n: 1 / (2 * h) + 5 / (18 * d),
    ),
    "hgrn2": _Formula(
        lambda layers, d, h: layers * d,
        lambda d, h, n: 1 / (3 * h) + 29 / (72 * d),
    ),
    "cosformer2": _Formula(
        lambda layers, d, h: 2 * layers * d**2 / h + d**2 / h,
        lambda d, h, n: 3 / (4 * h) + 23 / (72 * d),
    ),
}
"""By type of the mixer; softmax is the paper's LLaMA."""


def paper_counts(model: ModelConfig, length: int) -> PaperCounts:
    """N and C / D of a model by Table 1: N = 12 l d^2 + ..., C / D = 72 l d^2 (1 + ...), at `length` tokens a sequence.

    Raises:
        ConfigError: the paper has no formula for the mixer, or the model has several.
    """
    token_mixers = [
        sublayer for _, block in model.blocks() for sublayer in block.sublayers if sublayer.attends_to != "itself"
    ]
    kinds = sorted({(mixer.type, getattr(mixer, "num_heads", 0)) for mixer in token_mixers})
    if len(kinds) != 1 or kinds[0][0] not in _FORMULAS:
        raise ConfigError(
            f"--counts paper: the model has {', '.join(f'{name} of {heads} heads' for name, heads in kinds)}, but the "
            f"paper's formulas are for models of one of {', '.join(_FORMULAS)}; use --counts model"
        )
    (name, heads), layers, width = kinds[0], len(token_mixers), model.hidden_size
    formula = _FORMULAS[name]
    weights = layers * width**2
    return PaperCounts(
        12 * weights + formula.extra_parameters(layers, width, heads),
        72 * weights * (1 + formula.extra_flops(width, heads, length)),
    )
