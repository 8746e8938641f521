"""The fit of one mixer's losses: surface, envelope, bands, and the largest size predicted from the smaller ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from megalin.errors import ConfigError
from megalin.scaling_laws.bands import RESAMPLES, Band, Resamples, band, resample, surface_bands
from megalin.scaling_laws.envelope import Envelope, Frontier, fit_envelope, frontier
from megalin.scaling_laws.optimum import Optimum, TokenCost, exponents, optimum, token_cost
from megalin.scaling_laws.surface import Surface, fit_surface

if TYPE_CHECKING:
    from megalin.scaling_laws.points import Points


class HeldOut(NamedTuple):
    """The loss of the largest size, and of its most tokens, predicted from the smaller sizes."""

    parameters: float
    tokens: float
    predicted: float
    measured: float
    band: Band
    """Band of a measurement there: of the surface and of the deviation of one loss."""

    @property
    def error(self) -> float:
        """predicted / measured - 1."""
        return self.predicted / self.measured - 1


class Fit(NamedTuple):
    """The scaling laws of one mixer."""

    points: Points
    surface: Surface
    cost: TokenCost
    a: float
    """Exponent of N_opt in C by the surface."""
    b: float
    """Exponent of D_opt in C by the surface."""
    envelope: Envelope
    frontier: Frontier
    bands: dict[str, Band]
    resamples: Resamples
    held_out: HeldOut | None
    held_out_problem: str
    """Reason why there is no prediction of the largest size; empty where there is one."""

    def best(self, flops: float) -> tuple[Optimum, Band]:
        """The best size and tokens for a number of FLOPs, with the band of their loss."""
        losses = [optimum(surface, self.cost, flops).loss for surface in self.resamples.surfaces]
        return optimum(self.surface, self.cost, flops), band(losses)

    def as_json(self) -> dict[str, Any]:
        """JSON object of `megalin fit --json`; an open end of a band is null."""
        held_out = self.held_out and {
            "predicted": self.held_out.predicted,
            "measured": self.held_out.measured,
            "error": self.held_out.error,
        }
        envelope = self.envelope
        return {
            **self.surface._asdict(),
            "a": self.a,
            "b": self.b,
            "envelope": {
                "coefficient": envelope.loss.coefficient,
                "exponent": envelope.loss.exponent,
                "a": envelope.parameters.exponent,
                "b": envelope.tokens.exponent,
            },
            "bands": {name: list(ends) for name, ends in self.bands.items()},
            "leave_largest_out": held_out,
        }


def fit_points(points: Points, resamples: int = RESAMPLES) -> Fit:
    """Fits the losses of one mixer.

    Raises:
        ConfigError: too few losses (`check_losses`), or scipy is not installed.
        DataError: no loss falls with FLOPs.
    """
    surface = fit_surface(points.losses)
    cost = token_cost(points)
    drawn = resample(points, surface, resamples)
    found = frontier(points)
    envelope = fit_envelope(found)
    bands = surface_bands(drawn.surfaces)
    pairs = [exponents(each, cost) for each in drawn.surfaces]
    bands |= {name: band([pair[index] for pair in pairs]) for index, name in enumerate("ab")}
    bands |= _envelope_bands(points, drawn)
    held_out, problem = _held_out(points, resamples)
    if held_out is not None:
        bands["leave_largest_out"] = held_out.band
    a, b = exponents(surface, cost)
    return Fit(points, surface, cost, a, b, envelope, found, bands, drawn, held_out, problem)


def _envelope_bands(points: Points, drawn: Resamples) -> dict[str, Band]:
    fits = [fit_envelope(frontier(points, row)) for row in drawn.log_losses]
    values = {
        "envelope_coefficient": [fit.loss.coefficient for fit in fits],
        "envelope_exponent": [fit.loss.exponent for fit in fits],
        "envelope_a": [fit.parameters.exponent for fit in fits],
        "envelope_b": [fit.tokens.exponent for fit in fits],
    }
    return {name: band(numbers) for name, numbers in values.items()}


def _held_out(points: Points, resamples: int) -> tuple[HeldOut | None, str]:
    losses = points.losses
    largest = losses.parameters == losses.parameters.max()
    rest = points.take(~largest)
    rest = rest._replace(groups=np.unique(rest.groups, return_inverse=True)[1].astype(np.intp))
    try:
        surface = fit_surface(rest.losses)
    except ConfigError as error:
        return None, f"without the largest size: {error}"
    place = max(np.flatnonzero(largest), key=lambda index: losses.tokens[index])
    at = float(losses.parameters[place]), float(losses.tokens[place])
    drawn = resample(rest, surface, resamples)
    errors = drawn.deviation * np.random.default_rng(1).standard_normal(len(drawn.surfaces))
    values = np.array([float(each.loss(*at)) for each in drawn.surfaces]) * np.exp(errors)
    return HeldOut(*at, float(surface.loss(*at)), float(losses.loss[place]), band(values)), ""
