"""megalin: distributed pretraining of linear-complexity language models.

The Python API (docs/api.md). Names are imported when they are first read, so that `import megalin` needs no torch:

    build_model(config, device=, dtype=, seed=)   a decoder with fresh weights, for plain PyTorch
    load(folder, step=)                           a run's model, with its tokenizer
    Trainer(config, folder).train()               a training run
    presets(family)                               names of models
    datasets                                      token shards, their samples and batches
    ops                                           scans, attention, norms, gates, positions, loss
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megalin import datasets, ops
    from megalin.api.build import build_model, load, presets
    from megalin.api.causal_lm import CausalLM, CausalLMOutput
    from megalin.api.trainer import Trainer
    from megalin.errors import MegalinError

__version__ = "0.1.0"

__all__ = [
    "CausalLM",
    "CausalLMOutput",
    "MegalinError",
    "Trainer",
    "build_model",
    "datasets",
    "load",
    "ops",
    "presets",
]

_PLACES = {
    "CausalLM": "megalin.api.causal_lm",
    "CausalLMOutput": "megalin.api.causal_lm",
    "MegalinError": "megalin.errors",
    "Trainer": "megalin.api.trainer",
    "build_model": "megalin.api.build",
    "load": "megalin.api.build",
    "presets": "megalin.api.build",
}
_ROOMS = ("datasets", "ops")


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return importlib.import_module(f"megalin.{name}")
    if name not in _PLACES:
        raise AttributeError(f"module 'megalin' has no attribute {name!r}; it has {', '.join(__all__)}")
    value = globals()[name] = getattr(importlib.import_module(_PLACES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
