"""Figures of an inspection: heat maps over layers and heads, and over the tokens of a sample."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megalin.files import storage_errors
from megalin.inspection.inspect_run import Inspection, Layer
from megalin.inspection.statistics import Array, LayerGates

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_ROWS = "head, or channel of a mixer with one head; neighbours are joined beyond 64"


def write_figures(result: Inspection, folder: Path) -> list[Path]:
    """Writes the figures of an inspection as PNG files into `folder`; none without a decay.

    mean-decay.png, half-life.png, lower-bounds.png: [layers x heads]. decays.png: distribution of each layer's decays.
    curves.png: the decay of each layer, token by token. tokens-PATH.png: decay and gates of a layer, [heads x tokens].

    Raises:
        StorageError: a file cannot be written.
    """
    layers = [(each, each.gates) for each in result.layers if each.gates is not None]
    if not layers:
        return []
    written: list[Path] = []

    def save(name: str, figure: Figure) -> None:
        path = folder / f"{name}.png"
        with storage_errors(path):
            folder.mkdir(parents=True, exist_ok=True)
            figure.savefig(path, format="png")
        written.append(path)

    def by_head(name: str, title: str, values: Callable[[LayerGates], Array | None], **colors: Any) -> None:
        rows = [(each, found) for each, gates in layers if (found := values(gates)) is not None]
        if rows:
            save(name, _layer_map([each for each, _ in rows], [row for _, row in rows], title, _ROWS, **colors))

    step = f"step {result.step:,}"
    by_head("mean-decay", f"mean decay, {step}", lambda gates: gates.summary.row_means, vmin=0.0, vmax=1.0)
    by_head("half-life", f"log2 of the half-life in tokens, {step}", _log_half_lives)
    by_head("lower-bounds", f"learned lower bounds of the decay, {step}", _bounds, vmin=0.0, vmax=1.0)
    shares = [_distribution(gates) for _, gates in layers]
    save("decays", _layer_map([each for each, _ in layers], shares, f"fraction of decays, {step}", "decay in 1/32"))
    selected = [(each, gates) for each, gates in layers if gates.decay == "selected"]
    if selected:
        save("curves", _curves(selected, f"mean decay by token of the first sample, {step}"))
    for each, gates in selected:
        save(f"tokens-{each.path}", _token_maps(gates, f"{each.path} ({each.type}), {step}"))
    return written


def _new_figure(width: float, height: float, num_axes: int = 1) -> tuple[Figure, list[Axes]]:
    from matplotlib.figure import Figure  # takes half a second

    figure = Figure(figsize=(width, height), dpi=110, layout="constrained")
    return figure, [figure.add_subplot(num_axes, 1, number + 1) for number in range(num_axes)]


def _layer_map(layers: Sequence[Layer], rows: Sequence[Array], title: str, xlabel: str, **colors: Any) -> Figure:
    """Heat map of one row of values a layer; shorter rows end in white."""
    table = np.full((len(rows), max(map(len, rows))), np.nan)
    for line, row in zip(table, rows, strict=True):
        line[: len(row)] = row
    figure, (axes,) = _new_figure(8.0, 1.6 + 0.22 * len(rows))
    image = axes.imshow(table, aspect="auto", interpolation="nearest", **colors)
    axes.set_yticks(range(len(rows)), [f"{each.path.removeprefix('blocks.')} {each.type}" for each in layers])
    axes.tick_params("y", labelsize=7)
    axes.set_xlabel(xlabel)
    axes.set_title(title)
    figure.colorbar(image)
    return figure


def _log_half_lives(gates: LayerGates) -> Array:
    """[rows] log2 of the median half-life of each row's channels; NaN where it is infinite or zero."""
    units = gates.half_life[0] if gates.num_heads == 1 else np.median(gates.half_life, axis=1)
    found = np.array([np.median(row) for row in np.split(units, gates.first_units[1:])])
    return np.log2(found, out=np.full_like(found, np.nan), where=np.isfinite(found) & (found > 0))


def _bounds(gates: LayerGates) -> Array | None:
    """[rows] mean lower bound of each row's channels."""
    if gates.lower_bounds is None:
        return None
    units = gates.lower_bounds[0] if gates.num_heads == 1 else gates.lower_bounds.mean(axis=1)
    return np.array([row.mean() for row in np.split(units, gates.first_units[1:])])


def _distribution(gates: LayerGates) -> Array:
    """[bins] fraction of all decays."""
    counts = gates.summary.histogram.sum(0)
    return counts / counts.sum()


def _curves(layers: Sequence[tuple[Layer, LayerGates]], title: str) -> Figure:
    figure, (axes,) = _new_figure(9.0, 4.5)
    for number, (each, gates) in enumerate(layers):
        color = f"C{number}" if len(layers) <= 10 else (number / (len(layers) - 1), 0.2, 0.6)  # deep layers are red
        axes.plot(gates.summary.tokens.mean(0), linewidth=0.9, color=color, label=each.path.removeprefix("blocks."))
    axes.set_xlabel("token")
    axes.set_ylabel("decay, mean over heads and channels")
    axes.set_title(title)
    axes.legend(fontsize=6, ncols=max(1, len(layers) // 16), loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def _token_maps(gates: LayerGates, title: str) -> Figure:
    """Heat maps [heads x tokens] of the decay and of each further gate."""
    maps = {"decay": gates.summary.tokens} | {name: gate.tokens for name, gate in gates.gates.items()}
    figure, axes = _new_figure(9.0, 0.8 + 1.9 * len(maps), len(maps))
    for place, (name, values) in zip(axes, maps.items(), strict=True):
        image = place.imshow(values, aspect="auto", interpolation="nearest", vmin=0.0, vmax=max(1.0, values.max()))
        place.set_ylabel(name.replace("_", " "))
        figure.colorbar(image)
    axes[0].set_title(title)
    axes[-1].set_xlabel("token of the first sample; rows: " + _ROWS)
    return figure
