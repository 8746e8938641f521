"""The model of a config, whatever its kind."""

from __future__ import annotations

from megalin.errors import ConfigError
from megalin.model.config import AnyModelConfig, EncoderConfig
from megalin.model.encoder import Encoder
from megalin.model.language_model import LanguageModel
from megalin.parallel.context import ContextParallel
from megalin.parallel.tensor_parallel import TensorParallel

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
    for a model that cannot split its sequences over the context-parallel axis."""
    if isinstance(config, EncoderConfig):
        if cp is not None and cp.size > 1:
            raise ConfigError(
                f'model.kind = "encoder": an encoder needs the whole sequence on each rank, but parallel.cp = '
                f"{cp.size} splits it; use parallel.cp = 1"
            )
        return Encoder(config, tp, recompute=recompute)
    return LanguageModel(config, tp, cp=cp, recompute=recompute)
