"""Synthetic losses of known surfaces, for the tests of the scaling laws."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from megalin.scaling_laws.points import Point, Points, by_mixer
from megalin.scaling_laws.surface import Surface

CHINCHILLA = Surface(1.8172, 482.01, 2085.43, 0.3478, 0.3658)
"""Epoch's replication of Chinchilla (Besiroglu et al. 2024)."""
WIDE = (np.geomspace(20e6, 6e9, 7), np.geomspace(5, 80, 5))
"""7 sizes x 5 tokens a parameter."""
SMALL = (np.array([1e6, 3e6, 9e6, 27e6]), np.array([5.0, 10.0, 20.0]))
"""The small ladder: 4 sizes x 3 tokens a parameter."""
MANY_RUNS = (np.geomspace(5e6, 2e9, 9), np.array([5.0, 10.0, 20.0]))
"""9 trunks with 3 branches each."""


def ladder(
    design: tuple[np.ndarray, np.ndarray],
    *,
    surface: Surface = CHINCHILLA,
    noise: float = 0.005,
    run_noise: float | None = None,
    seed: int = 0,
    mixer: str = "",
    state: float | None = None,
) -> list[Point]:
    """Losses of a design with normal deviations of log L.

    Args:
        run_noise: deviation that the losses of a size share, which then are branches of one run.
        state: bytes of the state of a parameter.
    """
    rng = np.random.default_rng(seed)
    points = []
    for size in map(float, design[0]):
        shared = 0.0 if run_noise is None else run_noise * rng.standard_normal()
        for tokens in size * design[1]:
            loss = float(surface.loss(size, tokens)) * float(np.exp(shared + noise * rng.standard_normal()))
            held = None if state is None else state * size
            run = "" if run_noise is None else str(size)
            points.append(Point(size, float(tokens), loss, 6 * size * float(tokens), mixer, held, run))
    return points


def losses_of(design: tuple[np.ndarray, np.ndarray], **options: float) -> Points:
    """`ladder` as the points of one mixer."""
    (points,) = by_mixer(ladder(design, **options)).values()  # type: ignore[arg-type]
    return points


def write_csv(path: Path, points: list[Point], columns: tuple[str, ...] = ("parameters", "tokens", "loss")) -> Path:
    """Writes columns of points as CSV."""
    rows = [",".join(str(getattr(point, name)) for name in columns) for point in points]
    path.write_text("\n".join([",".join(columns), *rows]) + "\n")
    return path
