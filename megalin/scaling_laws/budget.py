"""Predictions for a budget of FLOPs, or of GPU-hours at the utilisation that the planner expects."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from megalin.errors import ConfigError
from megalin.model.config import ModelConfig
from megalin.model.language_model import LanguageModel
from megalin.model.presets import load_preset, preset_names
from megalin.planner.estimate import Estimator
from megalin.planner.hardware import GPUS_PER_HOST, HARDWARE, Hardware
from megalin.planner.search import Limits, search, usable_bytes
from megalin.planner.workload import Workload
from megalin.scaling_laws.bands import Band
from megalin.scaling_laws.fit import Fit
from megalin.scaling_laws.optimum import Optimum, optimum
from megalin.scaling_laws.runs import mixer_name

SAMPLES_PER_GPU = 4
"""Samples a step on each GPU of the planned model."""
_FIRST_UTILISATION = 0.4
"""Fraction of the GPU's matrix rate with which the size of the planned model is guessed."""
_FALLBACK = "softmax"
"""Mixer of the presets that stand in for a mixer without any."""


class Budget(NamedTuple):
    """A question of `megalin fit --ask`."""

    flops: float | None
    gpu_hours: float | None = None
    hardware: Hardware | None = None


class Candidate(NamedTuple):
    """A model whose utilisation the planner can estimate."""

    name: str
    model: ModelConfig
    length: int
    """Tokens a sample."""


class Utilisation(NamedTuple):
    """Model FLOPs of training over the GPU's matrix rate."""

    fraction: float
    source: str
    """Origin of the number, for people."""


class Answer(NamedTuple):
    """The best model of a mixer for a budget."""

    flops: float
    best: Optimum
    band: Band
    """Of the loss."""
    extrapolation: float
    """FLOPs over the most of a measured loss."""
    utilisation: Utilisation | None
    """Of a budget in GPU-hours."""

    def as_json(self) -> dict[str, Any]:
        """JSON object; N and D are null where the surface has no optimum."""
        sizes = {"parameters": self.best.parameters, "tokens": self.best.tokens}
        return {
            "flops": self.flops,
            **{name: value if math.isfinite(value) else None for name, value in sizes.items()},
            "loss": self.best.loss,
            "band": list(self.band),
            "extrapolation": self.extrapolation,
            "mfu": self.utilisation and self.utilisation.fraction,
            "mfu_source": self.utilisation and self.utilisation.source,
        }


def parse_budget(text: str) -> Budget:
    """Parses `1e21`, `1e21 FLOPs` or `1000 h100-hours`. Raises ConfigError for anything else."""
    match = re.fullmatch(r"\s*([0-9.]+(?:e\+?[0-9]+)?)\s*(flops|([a-z0-9]+)[- ]hours?)?\s*", text.lower())
    try:
        number = float(match[1]) if match else math.nan
    except ValueError:
        number = math.nan
    if match is None or not (math.isfinite(number) and number > 0) or match[3] not in {None, *HARDWARE}:
        raise ConfigError(
            f"--ask {text}: not a budget; write it as 1e21, or as 1000 h100-hours (GPUs: {', '.join(HARDWARE)})"
        )
    return Budget(number) if match[3] is None else Budget(None, number, HARDWARE[match[3]])


def answer(
    fit: Fit,
    budget: Budget,
    *,
    mixer: str,
    candidates: Sequence[Candidate] = (),
    utilisation: Utilisation | None = None,
) -> Answer:
    """The best size and tokens of a mixer for a budget.

    GPU-hours are FLOPs by the matrix rate and the utilisation of the preset of this mixer, or of the candidate, that is
    nearest in size to the best one at a utilisation of 40 %.

    Args:
        utilisation: replaces the planner's.

    Raises:
        ConfigError: the budget is below the FLOPs of every measured loss, or the planner finds no layout.
    """
    flops, used = budget.flops, None
    if flops is None:
        assert budget.hardware is not None, budget
        assert budget.gpu_hours is not None, budget
        most = budget.gpu_hours * 3600 * budget.hardware.matrix_flops
        size = optimum(fit.surface, fit.cost, _FIRST_UTILISATION * most).parameters
        used = utilisation or planned_utilisation(nearest(mixer, size, candidates), budget.hardware)
        flops = used.fraction * most
    least, largest = float(fit.points.flops.min()), float(fit.points.flops.max())
    if flops < least:
        raise ConfigError(
            f"--ask: {flops:.3g} FLOPs are fewer than the {least:.3g} of the smallest measured loss; use "
            "a larger budget"
        )
    best, ends = fit.best(flops)
    return Answer(flops, best, ends, flops / largest, used)


def nearest(mixer: str, parameters: float, candidates: Sequence[Candidate]) -> Candidate:
    """The candidate or preset of a mixer that is nearest in parameters without embeddings, as a ratio; of the presets
    named MIXER-... or with that mixer, else of those with softmax attention. The largest for NaN parameters."""
    presets = {name: model for name in preset_names() if isinstance(model := load_preset(name).model, ModelConfig)}

    def of(kind: str) -> list[Candidate]:
        return [
            Candidate(f"preset {name}", model, 8192)
            for name, model in presets.items()
            if mixer_name(model) == kind or (kind and name.startswith(f"{kind.lower()}-"))
        ]

    found = [*candidates, *of(mixer)] or of(_FALLBACK)
    target = math.inf if math.isnan(parameters) else parameters
    return min(found, key=lambda each: abs(math.log(max(1, _size(each.model))) - math.log(min(target, 1e15))))


def _size(model: ModelConfig) -> int:
    built = LanguageModel(model)
    return built.num_parameters() - built.num_embedding_parameters()


def planned_utilisation(candidate: Candidate, hardware: Hardware) -> Utilisation:
    """The utilisation of the planner's fastest layout on one GPU, or on 8 where one has too little memory.

    Raises:
        ConfigError: no layout fits.
    """
    model = LanguageModel(candidate.model)
    for gpus in (1, GPUS_PER_HOST):
        batch = SAMPLES_PER_GPU * gpus
        workload = Workload(candidate.model, candidate.length, batch, torch.bfloat16, compiled=True)
        limits = Limits(gpus, usable_bytes(hardware.memory_bytes))
        if best := search(Estimator(workload, hardware), limits, count=1).best:
            rate = best[0].tokens_per_second * model.training_flops(candidate.length)
            where = f"{candidate.name}, {best[0].layout.name()} on {gpus} x {hardware.name}"
            return Utilisation(rate / (gpus * hardware.matrix_flops), f"planner: {where}")
    raise ConfigError(
        f"--ask: {candidate.name} fits no layout of {GPUS_PER_HOST} x {hardware.name}; give the utilisation, for "
        "example --mfu 0.4"
    )


def answer_lines(text: str, answers: Mapping[str, Answer]) -> list[str]:
    """Lines for each mixer's answer."""
    lines = [f"best models for {text}:"]
    for mixer, found in answers.items():
        low, high = ("open" if end is None else f"{end:.4f}" for end in found.band)
        best = found.best
        lines.append(
            f"  {mixer or 'all points'}: N {best.parameters:.3g}, D {best.tokens:.3g}, loss {best.loss:.4f} "
            f"[{low}, {high}]; {found.flops:.3g} FLOPs, {found.extrapolation:.3g} times the most measured"
        )
        if found.utilisation is not None:
            lines.append(f"    MFU {found.utilisation.fraction:.1%} ({found.utilisation.source})")
    return lines
