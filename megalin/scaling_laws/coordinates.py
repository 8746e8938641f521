"""Coordinate check: the size of every sub-layer's output, and of its change in training, over the width of the model.

Source: Yang et al. 2022 (Tensor Programs V), appendix D.1: where a parametrisation transfers over widths, both stay
constant as the width grows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from megalin.errors import ConfigError, NumericError
from megalin.model.config import ModelConfig
from megalin.model.language_model import LanguageModel
from megalin.optim.adamw import build_optimizer
from megalin.optim.config import OptimizerConfig
from megalin.parallel.initialisation import init_weights
from megalin.scaling_laws.optimum import power_law
from megalin.verify.case import HEAD_DIM, shrink_to

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDTHS = (32, 64, 128, 256)
SAMPLES, LENGTH, VOCABULARY = 4, 64, 300
REPEAT = 2
"""Most repetitions of a kind of block."""
LEAST_HEADS = 4


class Coordinate(NamedTuple):
    """A sub-layer's output at one width."""

    name: str
    """block.sublayer type, or logits."""
    width: int
    size: float
    """Root mean square of the output after the last step."""
    change: float
    """Root mean square of its difference from the output of the initial weights, for the same tokens."""


class Growth(NamedTuple):
    """Exponents of a sub-layer's coordinates in the width; 0: it does not change with the width."""

    name: str
    size: float
    change: float


def coordinate_check(
    model: ModelConfig, *, widths: Sequence[int] = WIDTHS, steps: int = 4, learning_rate: float = 1e-3, seed: int = 0
) -> list[Coordinate]:
    """Trains the structure of `model` at each width on one batch of random tokens with AdamW, in fp32.

    A width has width / 8 heads of 8; each kind of block stands at most twice. Weights at rest have the initial
    distribution of the model's own config.

    Raises:
        ConfigError: fewer than two widths, or one that is no multiple of 32.
        NumericError: an output is not finite.
    """
    if len(set(widths)) < 2 or any(width % (HEAD_DIM * LEAST_HEADS) or width < 1 for width in widths):
        raise ConfigError(
            f"--widths {' '.join(map(str, widths))}: give at least two different multiples of {HEAD_DIM * LEAST_HEADS}"
        )
    found = []
    for width in sorted(set(widths)):
        heads = width // HEAD_DIM
        small = shrink_to(model, num_heads=heads, repeat=REPEAT, vocab_size=VOCABULARY, max_positions=LENGTH)
        assert isinstance(small, ModelConfig), type(small)
        found += _at_width(small, steps, learning_rate, seed)
    return found


def growths(coordinates: Sequence[Coordinate]) -> list[Growth]:
    """Least-squares slopes of log size and log change over log width, by name; NaN where a value is 0."""
    found = []
    for name in dict.fromkeys(each.name for each in coordinates):
        own = [each for each in coordinates if each.name == name]
        log_width = np.log([each.width for each in own])
        slopes = []
        for values in ([each.size for each in own], [each.change for each in own]):
            slopes.append(power_law(log_width, np.log(values))[0] if min(values) > 0 else math.nan)
        found.append(Growth(name, *slopes))
    return found


def coordinate_figure(coordinates: Sequence[Coordinate]) -> Figure:
    """Size and change of each sub-layer over the width."""
    from matplotlib.figure import Figure  # takes half a second

    figure = Figure(figsize=(11.0, 4.6), dpi=150, layout="constrained")
    panels = zip(figure.subplots(1, 2), ("size", "change"), strict=True)
    for axes, field in panels:
        for name in dict.fromkeys(each.name for each in coordinates):
            own = [each for each in coordinates if each.name == name]
            axes.plot([each.width for each in own], [getattr(each, field) for each in own], "o-", label=name)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel("width")
        axes.set_ylabel(f"root mean square of the output{'' if field == 'size' else ' minus the initial one'}")
        axes.grid(color="0.9")
    axes.legend(frameon=False, fontsize="x-small")
    return figure


def _at_width(config: ModelConfig, steps: int, learning_rate: float, seed: int) -> list[Coordinate]:
    model = LanguageModel(config)
    model.to_empty(device="cpu")
    init_weights(model, seed)
    model.after_optimizer_step()
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCABULARY, (SAMPLES, LENGTH + 1), generator=generator)
    tokens, labels = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    draw = torch.arange(SAMPLES)
    model.eval()  # dropout masks would be part of the outputs
    initial = _outputs(model, tokens)
    settings = OptimizerConfig(lr=learning_rate, weight_decay=0.0)
    optimizer = build_optimizer(model, settings, model.no_decay_names(), plain=True)
    for _ in range(steps):
        optimizer.zero_grad()
        sums = model(tokens, labels=labels, losses="sum", draw=draw).loss_sums()
        (sums.sum() / labels.numel()).backward()
        optimizer.step()
        model.after_optimizer_step()
    last = _outputs(model, tokens)
    width = config.hidden_size
    for name, output in last.items():
        if not bool(output.isfinite().all()):
            raise NumericError(f"{name} is not finite at width {width} after {steps} steps; lower --lr")
    return [Coordinate(name, width, _rms(last[name]), _rms(last[name] - initial[name])) for name in last]


@torch.no_grad()
def _outputs(model: LanguageModel, tokens: Tensor) -> dict[str, Tensor]:
    """Outputs of all sub-layers by name, and the logits of the vocabulary."""
    found: dict[str, Tensor] = {}

    def keep(name: str) -> Callable[[nn.Module, object, object], None]:
        def hook(module: nn.Module, inputs: object, output: object) -> None:
            found[name] = output.y.detach().clone()  # type: ignore[attr-defined]

        return hook

    handles = []
    types = [[sublayer.type for sublayer in block.sublayers] for _, block in model.config.blocks()]
    for number, (block, names) in enumerate(zip(model.block_list(), types, strict=True)):
        for index, (mixer, name) in enumerate(zip(block.mixers(), names, strict=True)):
            handles.append(mixer.register_forward_hook(keep(f"{number}.{index} {name}")))
    try:
        logits = model(tokens).logits
    finally:
        for handle in handles:
            handle.remove()
    found["logits"] = logits[..., :VOCABULARY].clone()
    return found


def _rms(values: Tensor) -> float:
    return float(values.double().square().mean().sqrt())
