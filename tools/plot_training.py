"""A picture of training steps: the JSON lines of tools/benchmark_train.py as bars of tokens/s, ours beside the peer's.

python tools/plot_training.py steps.jsonl steps.png
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from train_benchmarks.pictures import draw_lines


def plot(results: list[dict[str, Any]], path: Path) -> None:
    """Draws two bars a model: ours with its share of the floor, and the peer's; a line marks where the floor lies."""
    figure = Figure(figsize=(8, 1.0 + 0.75 * len(results)), layout="constrained")
    axes = figure.subplots()
    for row, result in enumerate(results):
        ours, share, peer = result["tokens_per_second"], result.get("floor_share"), result.get("peer")
        axes.barh(row - 0.2, ours, 0.36, color="C0")
        share_text = "" if share is None else f", {share:.0%} of the floor"
        axes.text(0, row - 0.2, f" {ours / 1e3:.1f}k{share_text}", va="center", color="white", fontsize=8)
        if share is not None:
            axes.plot([ours / share] * 2, [row - 0.4, row], color="black", linewidth=1)
        if peer is not None:
            theirs = peer["tokens_per_second"]
            axes.barh(row + 0.2, theirs, 0.36, color="C1")
            kind = peer["class"].removesuffix("ForCausalLM")
            name = f" {theirs / 1e3:.1f}k, {kind} of {peer['library']}, ours {ours / theirs:.2f}x"
            axes.text(0, row + 0.2, name, va="center", color="white", fontsize=8)
    axes.set_yticks(range(len(results)), [result["model"] for result in results], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.25 * max(result["tokens_per_second"] for result in results))
    first = results[0]
    axes.set_xlabel(f"tokens/s, {first['batch']} x {first['length']}, {first['device']} (black: at the step's floor)")
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    draw_lines(plot, __doc__)
