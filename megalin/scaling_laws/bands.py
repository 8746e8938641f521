"""90 % bands of a fit by bootstrap: of its unknowns, of its exponents in FLOPs, and of predictions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from megalin.optional import require
from megalin.scaling_laws.surface import NUM_UNKNOWNS, Surface, fit_surface

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from megalin.scaling_laws.points import Points

LEVEL = 0.90
"""Probability of a band."""
LEAST_GROUPS = 8
"""Runs from which the deviations of a run's losses are kept together; with fewer, the few signs repeat."""
RESAMPLES = 200
SEED = 0


class Band(NamedTuple):
    """Ends of a band; None where the losses do not bound it."""

    low: float | None
    high: float | None

    @property
    def is_open(self) -> bool:
        """True where an end is missing."""
        return self.low is None or self.high is None


class Resamples(NamedTuple):
    """Surfaces of resampled losses."""

    surfaces: list[Surface]
    log_losses: NDArray[np.float64]
    """[resamples, n] the resampled losses."""
    deviation: float
    """Estimate of the standard deviation of log L of one measurement, widened to Student's t."""
    method: str
    """Method, for people."""


def resample(points: Points, surface: Surface, count: int = RESAMPLES) -> Resamples:
    """Fits `count` sets of losses drawn around a surface.

    Normal errors with the standard deviation s = sqrt(sum r^2 / (n - 5)) of log L, widened by t_0.95(n - 5) / 1.645
    for the error of s itself (parametric bootstrap). With at least LEAST_GROUPS runs of which one has several losses:
    each run's residuals times one random sign (wild cluster bootstrap), with G - 1 degrees of freedom and
    the factor sqrt(n / (n - 5) * G / (G - 1)).

    Resampled residuals cover too little here: 63 to 82 % instead of 90 %.
    """
    rng = np.random.default_rng(SEED)
    fitted = np.log(surface.loss(*points.losses[:2]))
    residuals = np.log(points.losses.loss) - fitted
    number, groups = len(residuals), int(points.groups.max()) + 1
    degrees = number - NUM_UNKNOWNS
    deviation = math.sqrt(float(residuals @ residuals) / degrees)
    if clustered := LEAST_GROUPS <= groups < number:
        factor = _widening(groups - 1) * math.sqrt(number / degrees * groups / (groups - 1))
        signs = rng.choice([-1.0, 1.0], size=(count, groups))
        errors = factor * residuals * signs[:, points.groups]
    else:
        errors = _widening(degrees) * deviation * rng.standard_normal((count, number))
    log_losses = fitted + errors
    surfaces = [fit_surface(points.losses._replace(loss=np.exp(row)), start=surface) for row in log_losses]
    method = f"wild cluster bootstrap over {groups} runs" if clustered else "parametric bootstrap with normal errors"
    return Resamples(surfaces, log_losses, _widening(degrees) * deviation, f"{method}, {count} resamples")


def _widening(degrees: int) -> float:
    """Ratio of the quantiles of Student's t and of the normal distribution at the band's end."""
    special = require("scipy.special", "fit", extra="scaling")
    end = (1 + LEVEL) / 2
    return float(special.stdtrit(degrees, end) / special.ndtri(end))


def band(values: Sequence[float] | NDArray[np.float64], *, lowest: float = -math.inf) -> Band:
    """Quantiles of resampled values; an end that is not finite, or at the value's bound `lowest`, is open."""
    numbers = np.asarray(values, np.float64)
    numbers = np.where(np.isnan(numbers), np.inf, numbers)
    tail = (1 - LEVEL) / 2
    low = float(np.quantile(numbers, tail, method="lower"))
    high = float(np.quantile(numbers, 1 - tail, method="higher"))
    return Band(low if low > lowest and math.isfinite(low) else None, high if math.isfinite(high) else None)


def surface_bands(surfaces: Sequence[Surface]) -> dict[str, Band]:
    """Bands of the five unknowns. E is open below where it reaches 0, an exponent where it reaches a bound of the
    search, and A or B where its exponent does."""
    names = Surface._fields
    bands = {name: band([getattr(surface, name) for surface in surfaces], lowest=1e-9) for name in names}
    tail = (1 - LEVEL) / 2
    for number, pair in enumerate((("alpha", "A"), ("beta", "B"))):
        for name in pair:
            values = np.array([getattr(surface, name) for surface in surfaces])
            stuck = np.array([surface.at_bound[number] for surface in surfaces])
            middle = np.median(values)
            low, high = bands[name]
            bands[name] = Band(
                None if np.mean(stuck & (values < middle)) >= tail else low,
                None if np.mean(stuck & (values > middle)) >= tail else high,
            )
    return bands
