"""Models from their configs."""

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
    max_label_fraction: float = 1.0,
) -> Model:
    """The model on the meta device.

    Args:
        max_label_fraction: of a decoder, see `LanguageModel`.

    Raises:
        ConfigError: sizes that the tensor-parallel axis does not divide, or a mixer without context parallelism on a
            context-parallel axis.
    """
    if isinstance(config, EncoderConfig):
        return Encoder(config, tp, cp=cp, recompute=recompute)
    return LanguageModel(config, tp, cp=cp, recompute=recompute, max_label_fraction=max_label_fraction)


def check_divisions(config: AnyModelConfig, tp: int) -> None:
    """Checks that tensor parallelism over `tp` ranks divides the model's heads, widths and padded vocabulary.

    Raises:
        ConfigError: a size that it does not divide; the message names the values of tp that divide all sizes.
    """
    sizes = DividedSizes()
    make_model(config, sizes)
    sizes.check(tp)
