"""Plots JSON lines of tools/benchmark_train.py as bars of tokens/s, ours next to the baseline's.

python tools/plot_training.py steps.jsonl steps.png
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from train_benchmarks.pictures import draw_lines


def plot(results: list[dict[str, Any]], path: Path) -> None:
    """Draws two bars per model: ours with its fraction of the roofline, and the baseline's. Lines mark rooflines."""
    figure = Figure(figsize=(8, 1.0 + 0.75 * len(results)), layout="constrained")
    axes = figure.subplots()
    for row, result in enumerate(results):
        ours, baseline = result["tokens_per_second"], result.get("baseline")
        fraction = result.get("roofline_fraction")
        axes.barh(row - 0.2, ours, 0.36, color="C0")
        fraction_text = "" if fraction is None else f", {fraction:.0%} of the roofline"
        axes.text(0, row - 0.2, f" {ours / 1e3:.1f}k{fraction_text}", va="center", color="white", fontsize=8)
        if fraction is not None:
            axes.plot([ours / fraction] * 2, [row - 0.4, row], color="black", linewidth=1)
        if baseline is not None:
            theirs = baseline["tokens_per_second"]
            axes.barh(row + 0.2, theirs, 0.36, color="C1")
            kind = baseline["class"].removesuffix("ForCausalLM")
            name = f" {theirs / 1e3:.1f}k, {kind} of {baseline['library']}, ours {ours / theirs:.2f}x"
            axes.text(0, row + 0.2, name, va="center", color="white", fontsize=8)
    axes.set_yticks(range(len(results)), [result["model"] for result in results], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.25 * max(result["tokens_per_second"] for result in results))
    first = results[0]
    axes.set_xlabel(f"tokens/s, {first['batch']} x {first['length']}, {first['device']} (black: the step's roofline)")
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    draw_lines(plot, __doc__)
