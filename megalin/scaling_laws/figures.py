"""Figures of fits: the paper's figure 1, losses at equal FLOPs, and residuals."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from megalin.scaling_laws.optimum import optimum

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from megalin.scaling_laws.fit import Fit

NUM_FLOPS = 5
"""Numbers of FLOPs whose losses over the size are drawn."""
_PANELS = ("loss (nats a token)", "parameters without embeddings", "training tokens")


def figures(fits: Mapping[str, Fit]) -> dict[str, tuple[str, Figure]]:
    """Caption and figure by name: `laws`, and `isoflops` and `residuals` of each mixer."""
    found = {"laws": ("Loss, best size and best tokens over FLOPs", laws_figure(fits))}
    for number, (mixer, fit) in enumerate(fits.items(), 1):
        end = "" if len(fits) == 1 else f"-{number}"
        of = f" of {mixer}" if mixer else ""
        found[f"isoflops{end}"] = (f"Loss{of} over size at equal FLOPs", isoflop_figure(fit))
        found[f"residuals{end}"] = (f"Residuals{of}: measured over fitted loss", residual_figure(fit))
    return found


def laws_figure(fits: Mapping[str, Fit]) -> Figure:
    """A row of all mixers if there are several, then a row each: L(C), N_opt(C), D_opt(C), as figure 1 of the paper."""
    masters = int(len(fits) > 1)
    figure = _figure(13.0, 3.6 * (masters + len(fits)))
    grid = figure.subplots(masters + len(fits), 3, squeeze=False)
    titles = ["all mixers"] * masters + list(fits)
    for number, (mixer, fit) in enumerate(fits.items()):
        if masters:
            _draw_laws(grid[0], fit, f"C{number % 10}", label=mixer)
        row = grid[masters + number]
        _draw_curves(row[0], fit)
        _draw_laws(row, fit, "k", label="envelope")
        _draw_optimum(row, fit)
    for row, title in zip(grid, titles, strict=True):
        for axes, ylabel in zip(row, _PANELS, strict=True):
            _label(axes, "training FLOPs", f"{title}: {ylabel}" if title else ylabel)
    return figure


def isoflop_figure(fit: Fit) -> Figure:
    """Loss over N at several C: the surface, its minimum, and the sizes' losses interpolated between their points."""
    figure = _figure(8.0, 4.8)
    axes = figure.add_subplot()
    losses, log_c = fit.points.losses, np.log(fit.points.flops)
    sizes = np.unique(losses.parameters)
    for number, flops in enumerate(np.exp(np.linspace(log_c.min(), log_c.max(), NUM_FLOPS))):
        color = f"C{number}"
        wide = np.geomspace(sizes.min() / 2, sizes.max() * 2, 200)
        tokens = flops / (fit.cost.coefficient * wide**fit.cost.exponent)
        shown = (tokens > losses.tokens.min() / 2) & (tokens < losses.tokens.max() * 2)
        label = f"{flops:.2g} FLOPs"
        axes.plot(wide[shown], fit.surface.loss(wide[shown], tokens[shown]), color=color, label=label)
        best = optimum(fit.surface, fit.cost, float(flops))
        if np.isfinite(best.parameters) and wide[0] < best.parameters < wide[-1]:
            axes.plot(best.parameters, best.loss, "*", color=color, markersize=11)
        for size in sizes:
            own = np.flatnonzero(losses.parameters == size)
            own = own[np.argsort(log_c[own])]
            tolerance = 1e-9
            if log_c[own[0]] - tolerance <= np.log(flops) <= log_c[own[-1]] + tolerance:
                value = np.exp(np.interp(np.log(flops), log_c[own], np.log(losses.loss[own])))
                axes.plot(size, value, "o", color=color, markersize=5)
    _label(axes, "parameters without embeddings", _PANELS[0])
    axes.legend(frameon=False)
    return figure


def residual_figure(fit: Fit) -> Figure:
    """100 (L / fitted - 1) over N and over D."""
    figure = _figure(10.0, 3.8)
    losses = fit.points.losses
    values = 100 * (losses.loss / fit.surface.loss(losses.parameters, losses.tokens) - 1)
    panels = zip(figure.subplots(1, 2), (losses.parameters, losses.tokens), _PANELS[1:], strict=True)
    for axes, x, xlabel in panels:
        axes.axhline(0.0, color="0.6", linewidth=1.0)
        axes.plot(x, values, "o", markersize=4)
        _label(axes, xlabel, "residual (%)")
        axes.set_yscale("linear")
    return figure


def _figure(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure  # takes half a second

    return Figure(figsize=(width, height), dpi=150, layout="constrained")


def _draw_curves(axes: Any, fit: Fit) -> None:
    losses = fit.points.losses
    for size in np.unique(losses.parameters):
        own = np.flatnonzero(losses.parameters == size)
        own = own[np.argsort(fit.points.flops[own])]
        axes.plot(fit.points.flops[own], losses.loss[own], "o-", markersize=3, linewidth=1.0, label=f"N {size:.2g}")


def _draw_laws(row: Any, fit: Fit, color: str, *, label: str) -> None:
    """The envelope's points and its power laws."""
    found = fit.frontier
    laws = zip(row, (found.loss, found.parameters, found.tokens), fit.envelope, strict=True)
    for axes, values, law in laws:
        axes.plot(found.flops, values, ".", color=color, markersize=2, alpha=0.5)
        name = f"{label}: {law.coefficient:.3g} C^{law.exponent:.4f}"
        axes.plot(found.flops, law.at(found.flops), "--", color=color, linewidth=1.2, label=name)


def _draw_optimum(row: Any, fit: Fit) -> None:
    """The surface's lowest loss, size and tokens."""
    best = [optimum(fit.surface, fit.cost, float(flops)) for flops in fit.frontier.flops]
    columns = ([each.loss for each in best], [each.parameters for each in best], [each.tokens for each in best])
    for axes, values in zip(row, columns, strict=True):
        axes.plot(fit.frontier.flops, values, color="C3", linewidth=1.2, label="surface")


def _label(axes: Any, xlabel: str, ylabel: str) -> None:
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    axes.grid(color="0.9")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if axes.get_legend_handles_labels()[1]:
        axes.legend(frameon=False, fontsize="x-small")
