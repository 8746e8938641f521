"""Curves of a run over its steps: the plot of its losses, and figures for reports."""

from __future__ import annotations

import functools
import io
import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from megalin.errors import StorageError
from megalin.files import write_atomically
from megalin.train.jsonl import read_records

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Points = Sequence[tuple[float, float]]
"""(step, value) in the order of steps, or another x than the step."""
_COLORS = tuple(f"C{number}" for number in range(10))  # matplotlib's own cycle
_LARGEST = 1e300
EVALUATION = "evaluation_"
"""Start of the names of an evaluation's numbers among the metrics."""


class Curve(NamedTuple):
    """A curve over the steps."""

    label: str
    points: Points
    sparse: bool = False
    """Whether every point is drawn as a mark, as for evaluations; else a moving mean is drawn over the values."""
    run: str | None = None
    """Curves of one run have one colour, and its marks are not in the legend; a curve without a run is by itself."""


def finite(value: Any) -> float | None:
    """Converts any JSON value to a float; None if it is not a finite number."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and -_LARGEST < value < _LARGEST else None


def draw(
    ylabel: str,
    curves: Sequence[Curve],
    *,
    xlabel: str = "step (optimizer updates)",
    xscale: Literal["linear", "log"] = "linear",
    tokens_per_step: float | None = None,
    levels: Sequence[tuple[str, float]] = (),
    resumed: Sequence[int] = (),
    size: tuple[float, float] = (8.0, 4.8),
    top: float | None = None,
) -> Figure:
    """Draws the curves that have points, over steps or another x; more than ten colours repeat.

    Args:
        top: the largest value that is shown; left out, all are.
        tokens_per_step: adds an axis of training tokens above one of steps.
        levels: (label, value) of level lines, drawn horizontally.
        resumed: steps after which another process resumed the run, drawn as vertical lines.
        size: inches.
    """
    from matplotlib.figure import Figure  # takes half a second, and only one rank draws

    figure = Figure(figsize=size, dpi=150, layout="constrained")
    axes = figure.add_subplot()
    colors = dict(
        zip(dict.fromkeys(curve.run or curve.label for curve in curves), itertools.cycle(_COLORS), strict=False)
    )
    for curve in curves:
        color = colors[curve.run or curve.label]
        if curve.sparse and curve.points:
            label = None if curve.run else curve.label
            axes.plot(*zip(*curve.points, strict=True), "o-", color=color, markersize=4, label=label)
        elif curve.points:
            _plot_smoothed(axes, curve, color)
    for label, value in levels:
        axes.axhline(value, color="0.35", linestyle="--", linewidth=1.0, label=label)
    for number, step in enumerate(resumed):
        axes.axvline(step, color="0.6", linestyle=":", linewidth=1.0, label=None if number else "resumed")
    axes.set_xlabel(xlabel)
    axes.set_xscale(xscale)
    if tokens_per_step is not None:
        functions = (
            functools.partial(np.multiply, tokens_per_step),
            functools.partial(np.multiply, 1 / tokens_per_step),
        )
        above = axes.secondary_xaxis("top", functions=functions)
        above.set_xlabel("training tokens")
    axes.set_ylabel(ylabel)
    axes.margins(x=0.01)
    axes.set_ylim(top=top)
    axes.grid(color="0.9")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    return figure


def _plot_smoothed(axes: Any, curve: Curve, color: str) -> None:
    steps, values = np.array(curve.points, float).T
    window = min(max(1, len(values) // 50), 100)
    label = curve.label
    if window > 1:
        axes.plot(steps, values, color=color, alpha=0.25, linewidth=0.8)
        box = np.ones(window)
        values = np.convolve(values, box, "same") / np.convolve(np.ones_like(values), box, "same")
        label = f"{curve.label} (mean of {window} steps)"
    axes.plot(steps, values, color=color, linewidth=1.6, label=label)


def evaluated(values: Mapping[str, Any]) -> str:
    """The size of an evaluation, such as "16,384 tokens", from its numbers; empty if it was not logged."""
    for unit in ("sequences", "tokens"):  # an encoder's masked tokens differ between evaluations of equal sequences
        if (size := finite(values.get(unit))) is not None:
            return f"{size:,.0f} {unit}"
    return ""


def held_out_curves(points: Iterable[tuple[float, float, str]], label: str, *, run: str | None = None) -> list[Curve]:
    """Curves of held-out losses at (x, loss, size of the evaluation), one for each size: means over different samples
    are not joined. The sizes are named if there are several."""
    sizes: dict[str, list[tuple[float, float]]] = {}
    for x, loss, size in points:
        sizes.setdefault(size, []).append((x, loss))
    names = {size: label if len(sizes) == 1 else f"{label}, {size or 'size not logged'}" for size in sizes}
    return [Curve(names[size], own, sparse=True, run=run) for size, own in sizes.items()]


def step_tokens(steps: Points) -> float | None:
    """Tokens a step from the tokens after each step; None if they are not proportional to the steps."""
    rates = {tokens / step for step, tokens in steps if step}
    return rates.pop() if len(rates) == 1 and max(rates) > 0 else None


def write_loss_curve(metrics_path: str | Path, png_path: str | Path, *, unigram_entropy: float | None = None) -> None:
    """Draws training and evaluation loss (nats per token) over steps from a `metrics.jsonl` into a PNG.

    Args:
        unigram_entropy: nats per token of the evaluation tokens under their own frequencies, drawn as a level line.

    Raises:
        StorageError: when the metrics cannot be read or hold no loss, or the PNG cannot be written.
    """
    training: list[tuple[int, float]] = []
    tokens: list[tuple[int, float]] = []
    evaluation: list[tuple[int, float, str]] = []
    try:
        for record in read_records(Path(metrics_path)):
            for name, points in (("loss", training), ("tokens", tokens)):
                if (value := finite(record.get(name))) is not None:
                    points.append((record["step"], value))
            if (value := finite(record.get("evaluation_loss"))) is not None:
                size = evaluated({name.removeprefix(EVALUATION): record[name] for name in record})
                evaluation.append((record["step"], value, size))
    except OSError as error:
        raise StorageError(f"{metrics_path}: cannot be read ({error.strerror}); give a run's metrics.jsonl") from None
    if not training:
        raise StorageError(f"{metrics_path}: no step with a finite loss; there is nothing to draw")
    levels = [] if unigram_entropy is None else [(f"unigram entropy ({unigram_entropy:.2f})", unigram_entropy)]
    curves = [Curve("training", training), *held_out_curves(evaluation, "evaluation")]
    figure = draw("loss (nats per token)", curves, levels=levels, tokens_per_step=step_tokens(tokens))
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    try:
        write_atomically(Path(png_path), picture.getvalue())
    except OSError as error:
        raise StorageError(
            f"{png_path}: cannot be written ({error.strerror}); free space or fix the permissions"
        ) from None
