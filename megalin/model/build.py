"""The model of a config, whatever its kind."""

from __future__ import annotations

from megalin.model.config import AnyModelConfig, EncoderConfig
from megalin.model.encoder import Encoder
from megalin.model.language_model import LanguageModel
from megalin.parallel.context_parallel import ContextParallel
from megalin.parallel.tensor_parallel import DividedSizes, TensorParallel

Model = LanguageModel | Encoder
"""Any model."""


def make_model(
    config: AnyModelConfig,
    tp: TensorParallel | None = None,
    *,
    cp: ContextParallel | None = None,
    recompute: bool = False,
) -> Model:
    """The model on the meta device. Raises ConfigError for sizes that the tensor-parallel axis does not divide, and
    for a mixer that cannot split its sequences over the context-parallel axis."""
    if isinstance(config, EncoderConfig):
        return Encoder(config, tp, cp=cp, recompute=recompute)
    return LanguageModel(config, tp, cp=cp, recompute=recompute)


def check_divisions(config: AnyModelConfig, tp: int) -> None:
    """Raises ConfigError where a size of the model is not divisible by a tensor-parallel axis of `tp` ranks; it names
    the axes that divide all of them: heads, widths and the padded vocabulary."""
    sizes = DividedSizes()
    make_model(config, sizes)
    sizes.check(tp)
