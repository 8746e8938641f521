"""The best model size and number of tokens for a number of FLOPs, by a fitted surface."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from megalin.scaling_laws.surface import Surface

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from megalin.scaling_laws.points import Points

_FAR = 10.0


class TokenCost(NamedTuple):
    """FLOPs of a token by model size, C / D = coefficient * N^exponent; 6 N where every weight counts once a pass.

    The exponent is below 1 where the head, whose operations N does not count, weighs more in small models.
    """

    coefficient: float
    exponent: float

    def flops(self, parameters: float) -> float:
        """FLOPs of a token, forward and backward."""
        return float(self.coefficient * parameters**self.exponent)


class Optimum(NamedTuple):
    """Lowest loss for a number of FLOPs."""

    parameters: float
    tokens: float
    loss: float


def token_cost(points: Points) -> TokenCost:
    """Least squares of log(C / D) over log N."""
    log_n, log_cost = np.log(points.losses.parameters), np.log(points.flops / points.losses.tokens)
    exponent, intercept = power_law(log_n, log_cost)
    return TokenCost(math.exp(intercept), exponent)


def power_law(log_x: NDArray[np.float64], log_y: NDArray[np.float64]) -> tuple[float, float]:
    """Slope and intercept of the least-squares line of log y over log x; slope 1 where all x are equal."""
    centre = log_x.mean()
    spread = float(np.sum((log_x - centre) ** 2))
    slope = float(np.sum((log_x - centre) * log_y)) / spread if spread > 1e-12 else 1.0
    return slope, float(log_y.mean() - slope * centre)


def exponents(surface: Surface, cost: TokenCost) -> tuple[float, float]:
    """Exponents a of N_opt and b of D_opt in C: a = beta / (alpha + p beta), b = alpha / (alpha + p beta), where FLOPs
    of a token grow with N^p."""
    total = surface.alpha + cost.exponent * surface.beta
    return surface.beta / total, surface.alpha / total


def optimum(surface: Surface, cost: TokenCost, flops: float) -> Optimum:
    """N and D = C / (c N^p) with the lowest loss: N^(alpha + p beta) = alpha A / (p beta B) (C / c)^beta.

    Where the surface depends on N or on D only (A or B is 0), N and D are NaN and the loss is E, its limit.
    """
    E, A, B, alpha, beta = surface
    p = cost.exponent
    if A <= 0 or B <= 0 or p <= 0:
        return Optimum(math.nan, math.nan, E)
    budget = math.log(flops / cost.coefficient)
    log_n = (math.log(alpha * A / (p * beta * B)) + beta * budget) / (alpha + p * beta)
    log_d = budget - p * log_n
    return Optimum(_exp(log_n), _exp(log_d), E + A * _exp(-alpha * log_n) + B * _exp(-beta * log_d))


def is_near_sizes(parameters: float, points: Points) -> bool:
    """Whether a size lies within a factor of ten of the measured ones; losses say nothing about a best size beyond."""
    sizes = points.losses.parameters
    return bool(sizes.min() / _FAR <= parameters <= sizes.max() * _FAR)


def _exp(value: float) -> float:
    """e^value; infinite above the range of a float."""
    return math.exp(value) if value < 709.0 else math.inf
