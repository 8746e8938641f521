"""The envelope L(C) = coefficient * C^exponent: the lowest loss at each number of FLOPs over all sizes.

Source: Shen et al. 2024 (scaling laws of linear complexity models), section 4; Approach 1 of Hoffmann et al. 2022.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from megalin.errors import DataError
from megalin.scaling_laws.optimum import power_law

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from megalin.scaling_laws.points import Points

NUM_FLOPS = 256
"""Numbers of FLOPs at which the sizes are compared, evenly spaced in log C; those of the points are added."""


class PowerLaw(NamedTuple):
    """y = coefficient * C^exponent."""

    coefficient: float
    exponent: float

    def at(self, flops: NDArray[np.float64] | float) -> NDArray[np.float64]:
        """y at each C."""
        return np.asarray(self.coefficient * np.power(flops, self.exponent))


class Envelope(NamedTuple):
    """Power laws of the envelope in C, FLOPs: least squares in logarithms."""

    loss: PowerLaw
    parameters: PowerLaw
    """N_opt, without embeddings."""
    tokens: PowerLaw
    """D_opt."""


class Frontier(NamedTuple):
    """Points of the envelope, [n] each, by rising FLOPs and falling loss."""

    flops: NDArray[np.float64]
    loss: NDArray[np.float64]
    parameters: NDArray[np.float64]
    tokens: NDArray[np.float64]
    compared: float
    """Fraction of the numbers of FLOPs at which two or more sizes have losses. Where it is small, N_opt and D_opt are
    those of the runs that were chosen, not of a comparison."""


def frontier(points: Points, log_loss: NDArray[np.float64] | None = None) -> Frontier:
    """The lowest loss at each C over the sizes, whose losses are interpolated between their points in log C; without
    losses above one that fewer FLOPs reach.

    Args:
        log_loss: replaces the points' own losses (log nats a token).
    """
    sizes, log_c = points.losses.parameters, np.log(points.flops)
    log_loss = np.log(points.losses.loss) if log_loss is None else log_loss
    grid = np.union1d(np.linspace(log_c.min(), log_c.max(), NUM_FLOPS), log_c)
    unique = np.unique(sizes)
    curves, tokens = np.empty((2, len(unique), len(grid)))  # [sizes, C]
    for row, size in enumerate(unique):
        own = np.flatnonzero(sizes == size)
        own = own[np.argsort(log_c[own], kind="stable")]
        curves[row] = np.interp(grid, log_c[own], log_loss[own], left=np.inf, right=np.inf)
        tokens[row] = np.interp(grid, log_c[own], np.log(points.losses.tokens[own]))
    best = curves.argmin(axis=0)
    lowest = curves.min(axis=0)
    kept = np.isfinite(lowest) & (lowest <= np.minimum.accumulate(lowest))
    best, columns = best[kept], np.flatnonzero(kept)
    compared = float(np.mean(np.isfinite(curves).sum(axis=0) > 1))
    return Frontier(np.exp(grid[kept]), np.exp(lowest[kept]), unique[best], np.exp(tokens[best, columns]), compared)


def fit_envelope(found: Frontier) -> Envelope:
    """Power laws through the points of an envelope.

    Raises:
        DataError: it has one point: no loss is below that of the fewest FLOPs.
    """
    if len(found.flops) < 2:
        raise DataError(
            "no loss is below that of the fewest FLOPs, so that L(C) has one point; check the columns loss and flops"
        )
    log_c = np.log(found.flops)
    laws = []
    for values in (found.loss, found.parameters, found.tokens):
        exponent, intercept = power_law(log_c, np.log(values))
        laws.append(PowerLaw(math.exp(intercept), exponent))
    return Envelope(*laws)
