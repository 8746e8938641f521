"""Plots JSON lines of tools/benchmark_train.py on several GPUs as fractions of one GPU's rate.

python tools/plot_parallel.py lines.jsonl parallel.png

The first line has one rank; lines with more ranks are compared with the last line of one rank before them. A model
under context parallelism at three lengths or more is drawn as a curve over the length instead.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from train_benchmarks.pictures import draw_lines

LENGTHS_OF_A_CURVE = 3


def mesh_name(result: dict[str, Any]) -> str:
    """Names the axes and options of a line's mesh, and its engine if it is not fsdp2."""
    parallel = result["parallel"]
    dp = result["ranks"] // math.prod(parallel.get(axis, 1) for axis in ("tp", "cp", "pp"))
    axes = [f"dp {dp}"] * (dp > 1) + [f"{name} {value}" for name, value in parallel.items()]
    if result.get("engine", "fsdp2") != "fsdp2":
        axes.append(result["engine"])
    return ", ".join(axes or ["one GPU"])


def label(result: dict[str, Any]) -> str:
    """Label of a line: model, mesh, recomputation, CUDA graph."""
    parts = [result["model"], mesh_name(result)]
    parts += ["recomputed"] * result["recompute"] + ["CUDA graph"] * result["cuda_graphs"]
    return ", ".join(parts)


def split_curves(results: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, list[dict[str, Any]]]]:
    """Splits lines into bars, in order, and curves by name, sorted by length."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for result in results:
        if result["parallel"].get("cp", 1) > 1:
            groups.setdefault(label(result), []).append(result)
    curves = {
        name: sorted(lines, key=lambda line: line["length"])
        for name, lines in groups.items()
        if len({line["length"] for line in lines}) >= LENGTHS_OF_A_CURVE
    }
    drawn = {id(line) for lines in curves.values() for line in lines}
    return [result for result in results if id(result) not in drawn], curves


def plot(results: list[dict[str, Any]], path: Path) -> None:
    """Draws a bar per line, in order: its tokens/s a rank over those of the last line of one rank before it. Curves are
    below the bars."""
    bars, curves = split_curves(results)
    heights = [1.0 + 0.35 * len(bars)] + [4.0] * bool(curves)
    figure = Figure(figsize=(9, sum(heights)), layout="constrained")
    axes = figure.subplots(len(heights), squeeze=False, height_ratios=heights)[:, 0]
    draw_bars(bars, axes[0])
    if curves:
        draw_curves(curves, axes[1])
    figure.savefig(path, dpi=110)


def draw_bars(results: list[dict[str, Any]], axes: Axes) -> None:
    """Draws fractions of one rank's rate as bars."""
    assert results[0]["ranks"] == 1, results[0]
    one = 0.0
    for row, result in enumerate(results):
        rate, first = result["tokens_per_second_per_rank"], result["ranks"] == 1
        one = rate if first else one
        axes.barh(row, rate / one, 0.7, color="C1" if first else "C0")
        axes.text(0, row, f" {rate / one:.1%}, {rate / 1e3:.1f}k tokens/s", va="center", color="white", fontsize=8)
    axes.set_yticks(range(len(results)), [label(result) for result in results], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel(f"tokens/s a GPU over those of one, {results[0]['device']}")


def draw_curves(curves: dict[str, list[dict[str, Any]]], axes: Axes) -> None:
    """Draws rates over the sequence length."""
    for name, lines in curves.items():
        rates = [line["tokens_per_second_per_rank"] / 1e3 for line in lines]
        axes.plot([line["length"] for line in lines], rates, marker="o", label=name)
        for line, rate in zip(lines, rates, strict=True):
            axes.annotate(
                f"{rate:.1f}", (line["length"], rate), (0, 5), textcoords="offset points", ha="center", fontsize=8
            )
    lengths = sorted({line["length"] for lines in curves.values() for line in lines})
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [f"{length:,}" for length in lengths], fontsize=7, rotation=20)
    axes.set_ylim(0, 1.15 * axes.get_ylim()[1])
    axes.set_xlabel("tokens of a sequence")
    axes.set_ylabel("thousand tokens/s a GPU")
    axes.legend(fontsize=8, loc="center right")


if __name__ == "__main__":
    draw_lines(plot, __doc__)
