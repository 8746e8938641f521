"""A picture of training on several GPUs: JSON lines of tools/benchmark_train.py as shares of one GPU's rate.

python tools/plot_parallel.py lines.jsonl parallel.png

The first line is of one rank; such a line is what those of more ranks after it are compared with.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from train_benchmarks.pictures import draw_lines


def mesh_name(result: dict[str, Any]) -> str:
    """The axes and options of a line's mesh, and its engine, as one runs it."""
    axes = [f"{name} {value}" for name, value in result["parallel"].items()]
    if not axes:
        axes = ["one GPU" if result["ranks"] == 1 else f"dp {result['ranks']}"]
    if result.get("engine", "fsdp2") != "fsdp2":
        axes.append(result["engine"])
    return ", ".join(axes)


def plot(results: list[dict[str, Any]], path: Path) -> None:
    """Draws a bar a line, in order: its tokens/s a rank over those of the last line of one rank before it."""
    figure = Figure(figsize=(8, 1.0 + 0.35 * len(results)), layout="constrained")
    axes = figure.subplots()
    assert results[0]["ranks"] == 1, results[0]
    one = 0.0
    for row, result in enumerate(results):
        rate, first = result["tokens_per_second_per_rank"], result["ranks"] == 1
        one = rate if first else one
        axes.barh(row, rate / one, 0.7, color="C1" if first else "C0")
        axes.text(0, row, f" {rate / one:.1%}, {rate / 1e3:.1f}k tokens/s", va="center", color="white", fontsize=8)
    names = [f"{result['model']}, {mesh_name(result)}" for result in results]
    axes.set_yticks(range(len(results)), names, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel(f"tokens/s a GPU over those of one, {results[0]['device']}")
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    draw_lines(plot, __doc__)
