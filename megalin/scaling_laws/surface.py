"""The surface L(N, D) = E + A / N^alpha + B / D^beta, fitted to losses by variable projection.

Source: Hoffmann et al. 2022 (Approach 3, Huber loss on log L); variable projection as in arXiv 2603.22339.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from megalin.errors import ConfigError
from megalin.optional import require

if TYPE_CHECKING:
    from numpy.typing import NDArray

HUBER_DELTA = 1e-3
"""Residual of log L from which the loss grows linearly."""
NUM_UNKNOWNS = 5
_EXPONENTS = np.linspace(0.05, 1.5, 30)
"""Values of alpha and beta of the grid, on which E, A and B are non-negative least squares."""
_NUM_STARTS = 3
"""Best cells of the grid from which all unknowns are refined together."""
_DELTAS = (math.inf, 5 * HUBER_DELTA, 2.5 * HUBER_DELTA, HUBER_DELTA)
"""Deltas of successive refinements, each from the result of the one before. With HUBER_DELTA alone, which is almost the
sum of absolute errors, one of ten refinements stops at a cost that is 12 to 105 % above the lowest."""
_LOWEST, _HIGHEST = 1e-3, 4.0
"""Bounds of the exponents in the refinement."""
_BOUNDS = np.array([0.0, 0.0, 0.0, _LOWEST, _LOWEST]), np.array([np.inf, np.inf, np.inf, _HIGHEST, _HIGHEST])


class Surface(NamedTuple):
    """L(N, D) = E + A / N^alpha + B / D^beta in nats a token; N: parameters without embeddings, D: tokens."""

    E: float
    A: float
    B: float
    alpha: float
    beta: float

    def loss(self, parameters: NDArray[np.float64] | float, tokens: NDArray[np.float64] | float) -> NDArray[np.float64]:
        """L at each N and D; shapes broadcast."""
        return np.asarray(self.E + self.A / np.power(parameters, self.alpha) + self.B / np.power(tokens, self.beta))

    @property
    def at_bound(self) -> tuple[bool, bool]:
        """True where alpha, and where beta, lies at a bound of the search: the losses do not bound it."""
        lowest, highest = _LOWEST * 1.01, _HIGHEST * 0.99
        return not lowest < self.alpha < highest, not lowest < self.beta < highest


class Losses(NamedTuple):
    """Measured losses: [n] parameters, tokens, and nats a token."""

    parameters: NDArray[np.float64]
    tokens: NDArray[np.float64]
    loss: NDArray[np.float64]

    def take(self, index: NDArray[np.intp] | NDArray[np.bool_]) -> Losses:
        """The losses at an index or where a mask is true."""
        return Losses(*(values[index] for values in self))


def fit_surface(losses: Losses, start: Surface | None = None) -> Surface:
    """The surface with the least sum of Huber losses of log L.

    Args:
        start: a surface to refine in place of the grid's best ones, for losses that differ little from its own.

    Raises:
        ConfigError: fewer than six losses, three sizes or three numbers of tokens; or scipy is not installed.
    """
    check_losses(losses)
    scale = _Scale.of(losses)
    starts = _grid_starts(losses, scale) if start is None else [scale.scaled(start)]
    found = min((_refine(losses, scale, unknowns) for unknowns in starts), key=lambda result: result.cost)
    return scale.surface(found.unknowns)


def check_losses(losses: Losses) -> None:
    """Raises ConfigError for losses from which the five unknowns cannot be had."""
    sizes, tokens = len(np.unique(losses.parameters)), len(np.unique(losses.tokens))
    if len(losses.loss) <= NUM_UNKNOWNS or sizes < 3 or tokens < 3:
        raise ConfigError(
            f"{len(losses.loss)} losses of {sizes} sizes and {tokens} token counts: L(N, D) has {NUM_UNKNOWNS} "
            f"unknowns and needs at least {NUM_UNKNOWNS + 1} losses, of 3 sizes and 3 token counts; train more runs"
        )


class _Scale(NamedTuple):
    """Geometric means of N and D. In N / N0 and D / D0 the three terms are of the size of the loss, which makes the
    refinement well-conditioned."""

    parameters: float
    tokens: float

    @classmethod
    def of(cls, losses: Losses) -> _Scale:
        return cls(*(float(np.exp(np.mean(np.log(values)))) for values in losses[:2]))

    def scaled(self, surface: Surface) -> NDArray[np.float64]:
        E, A, B, alpha, beta = surface
        return np.array([E, A / self.parameters**alpha, B / self.tokens**beta, alpha, beta])

    def surface(self, unknowns: NDArray[np.float64]) -> Surface:
        E, A, B, alpha, beta = map(float, unknowns)
        return Surface(E, A * self.parameters**alpha, B * self.tokens**beta, alpha, beta)


def _grid_starts(losses: Losses, scale: _Scale) -> list[NDArray[np.float64]]:
    """The best cells of the grid of exponents. E, A and B of a cell minimise squared relative errors."""
    nnls = require("scipy.optimize", "fit", extra="scaling").nnls
    ones = 1.0 / losses.loss
    by_size = [ones * (losses.parameters / scale.parameters) ** -alpha for alpha in _EXPONENTS]
    by_tokens = [ones * (losses.tokens / scale.tokens) ** -beta for beta in _EXPONENTS]
    cells = []
    for alpha, size_term in zip(_EXPONENTS, by_size, strict=True):
        for beta, token_term in zip(_EXPONENTS, by_tokens, strict=True):
            weights, error = nnls(np.stack([ones, size_term, token_term], axis=1), np.ones_like(ones))
            cells.append((error, np.array([*weights, alpha, beta])))
    cells.sort(key=lambda cell: cell[0])
    return [unknowns for _, unknowns in cells[:_NUM_STARTS]]


class _Minimum(NamedTuple):
    """A minimum of the Huber losses, in the units of `_Scale`."""

    unknowns: NDArray[np.float64]
    cost: float


def _refine(losses: Losses, scale: _Scale, start: NDArray[np.float64]) -> _Minimum:
    """Minimises the Huber losses over all five unknowns, from squared errors to HUBER_DELTA."""
    least_squares = require("scipy.optimize", "fit", extra="scaling").least_squares
    log_n, log_d = np.log(losses.parameters / scale.parameters), np.log(losses.tokens / scale.tokens)
    log_loss = np.log(losses.loss)

    def terms(unknowns: NDArray[np.float64]) -> tuple[NDArray[np.float64], ...]:
        size_term, token_term = np.exp(-unknowns[3] * log_n), np.exp(-unknowns[4] * log_d)
        return size_term, token_term, unknowns[0] + unknowns[1] * size_term + unknowns[2] * token_term

    def residuals(unknowns: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.log(terms(unknowns)[2]) - log_loss

    def jacobian(unknowns: NDArray[np.float64]) -> NDArray[np.float64]:
        size_term, token_term, predicted = terms(unknowns)
        columns = [
            np.ones_like(predicted),
            size_term,
            token_term,
            -unknowns[1] * size_term * log_n,
            -unknowns[2] * token_term * log_d,
        ]
        return np.stack(columns, axis=1) / predicted[:, None]

    lowest, highest = _BOUNDS
    unknowns, cost = start, math.inf
    for delta in _DELTAS:
        loss, scale_of_loss = ("linear", 1.0) if math.isinf(delta) else ("huber", delta)
        inside = np.clip(unknowns, lowest + 1e-9, highest - 1e-9)
        found = least_squares(
            residuals, inside, jacobian, bounds=_BOUNDS, loss=loss, f_scale=scale_of_loss, x_scale="jac", max_nfev=400
        )
        unknowns, cost = found.x, float(found.cost)
    return _Minimum(unknowns, cost)
