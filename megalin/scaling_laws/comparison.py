"""Comparison of mixers by their fitted surfaces: at equal FLOPs, and at equal sizes of the decoding state."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from megalin.scaling_laws.bands import Band, band
from megalin.scaling_laws.fit import Fit
from megalin.scaling_laws.optimum import is_near_sizes, power_law

NUM_STATES = 3
"""Sizes of the state at which mixers are compared, evenly spaced in the logarithm."""


class AtFlops(NamedTuple):
    """A mixer's lowest loss at a number of FLOPs."""

    mixer: str
    flops: float
    parameters: float
    tokens: float
    loss: float
    band: Band
    is_near_sizes: bool
    """Whether the size lies near the measured ones."""


class AtState(NamedTuple):
    """A mixer's loss at a size of its state and a number of FLOPs."""

    mixer: str
    state_bytes: float
    parameters: float
    tokens: float
    loss: float
    band: Band


class Comparison(NamedTuple):
    """Losses of mixers under equal conditions."""

    at_flops: list[AtFlops]
    """By FLOPs, then mixer."""
    at_state: list[AtState]
    """By state, then mixer; all at the FLOPs `state_flops`."""
    state_flops: float
    without_state: list[str]
    """Mixers without known sizes of their states: not given, growing with the sequence, or of one size."""
    state_problem: str
    """Reason why no sizes are compared; empty where they are."""

    @classmethod
    def of(cls, fits: Mapping[str, Fit]) -> Comparison:
        """Compares at the ends and the middle of the FLOPs, and of the states, that all mixers have."""
        low = max(float(fit.points.flops.min()) for fit in fits.values())
        high = min(float(fit.points.flops.max()) for fit in fits.values())
        flops = [low, math.sqrt(low * high), high] if low < high else [math.sqrt(low * high)]
        at_flops = [_at_flops(name, fit, each) for each in flops for name, fit in fits.items()]
        known = {name: fit for name, fit in fits.items() if _knows_states(fit)}
        at_state, problem = _at_states(known, flops[-1])
        return cls(at_flops, at_state, flops[-1], [name for name in fits if name not in known], problem)

    def lines(self) -> Iterator[str]:
        """Two tables of text."""
        yield "mixers at equal FLOPs, each at its best size:"
        rows = [
            (f"{row.flops:.3g}", row.mixer, f"{row.parameters:.3g}", f"{row.tokens:.3g}", *_loss(row))
            if row.is_near_sizes
            else (f"{row.flops:.3g}", row.mixer, *["-"] * 3, "the best size is far from the measured ones")
            for row in self.at_flops
        ]
        yield from aligned([("C", "mixer", "N", "D", "loss", "90 % band"), *rows])
        yield ""
        if self.state_problem:
            yield f"mixers at equal state bytes: {self.state_problem}"
            return
        yield f"mixers at equal state bytes of a sequence and {self.state_flops:.3g} FLOPs:"
        states = [
            (f"{row.state_bytes:,.0f}", row.mixer, f"{row.parameters:.3g}", f"{row.tokens:.3g}", *_loss(row))
            for row in self.at_state
        ]
        yield from aligned([("bytes", "mixer", "N", "D", "loss", "90 % band"), *states])
        if self.without_state:
            yield f"without a state of known, fixed size: {', '.join(self.without_state)}"


def aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Lines of columns, indented by two spaces."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _loss(row: AtFlops | AtState) -> tuple[str, str]:
    low, high = ("open" if end is None else f"{end:.4f}" for end in row.band)
    return f"{row.loss:.4f}", f"[{low}, {high}]"


def _at_flops(mixer: str, fit: Fit, flops: float) -> AtFlops:
    found, ends = fit.best(flops)
    return AtFlops(mixer, flops, *found, ends, is_near_sizes(found.parameters, fit.points))


def _knows_states(fit: Fit) -> bool:
    sizes, states = fit.points.losses.parameters, fit.points.state_bytes
    return bool(np.isfinite(states).all()) and len(np.unique(sizes)) > 1 and len(np.unique(states)) > 1


def _at_states(fits: Mapping[str, Fit], flops: float) -> tuple[list[AtState], str]:
    if len(fits) < 2:
        return [], "fewer than two mixers have states of known sizes that do not grow with the sequence"
    low = max(float(fit.points.state_bytes.min()) for fit in fits.values())
    high = min(float(fit.points.state_bytes.max()) for fit in fits.values())
    if low > high:
        return [], "no size of the state lies between the smallest and the largest of every mixer"
    found = []
    for state in np.geomspace(low, high, NUM_STATES if low < high else 1):
        for name, fit in fits.items():
            slope, intercept = power_law(np.log(fit.points.losses.parameters), np.log(fit.points.state_bytes))
            parameters = math.exp((math.log(state) - intercept) / slope)
            tokens = flops / fit.cost.flops(parameters)
            losses = [float(surface.loss(parameters, tokens)) for surface in fit.resamples.surfaces]
            loss = float(fit.surface.loss(parameters, tokens))
            found.append(AtState(name, float(state), parameters, tokens, loss, band(losses)))
    return found, ""
