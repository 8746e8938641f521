"""`megalin inspect`: decays, receptive fields, lower bounds and gates of a run on held-out tokens."""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Column, Table

from megalin.inspection.figures import write_figures
from megalin.inspection.inspect_run import Inspection, Layer, inspect_run, inspection_path
from megalin.inspection.statistics import quantiles
from megalin.terminal_output import terminal
from megalin.train.identity_file import read_identity, value_text

_TABLE_WIDTH = 170  # where the output is not a terminal


def run(arguments: argparse.Namespace) -> int:
    """Runs the command and returns the exit code."""
    folder: Path = arguments.folder
    result = inspect_run(
        folder, arguments.overrides, step=arguments.step, num_samples=arguments.samples, split=arguments.split
    )
    path = inspection_path(folder, result.step)
    figures = write_figures(result, arguments.png or path.with_suffix(""))
    identity = read_identity(folder)
    if arguments.json:
        known = {} if identity is None else {"identity": identity.model_dump(mode="json")}
        print(json.dumps(result.values() | known, allow_nan=False))
        return 0
    if identity is not None:
        print("\n".join(f"{name}: {value_text(value)}" for name, value in identity.inputs.items()))
        print("\n".join(map(str, identity.segments)) or "no value of config or inputs changed during the run")
    print(f"step {result.step}, {result.num_samples} samples of {result.split}, {result.num_tokens:,} tokens")
    Console(file=terminal(), width=None if sys.stdout.isatty() else _TABLE_WIDTH).print(_table(result))
    print(f"{path}: all numbers" + (f"; {figures[0].parent}: {len(figures)} figures" if figures else ""))
    return 0


def _table(result: Inspection) -> Table:
    """A row a mixer; numbers of tokens as smallest / median / largest over heads and channels."""
    headings = ("heads", "mean decay", "lower bounds", "half-life (tokens)", "effective length", "mean of gates")
    table = Table(Column("layer", no_wrap=True), Column("mixer", no_wrap=True), "decay", *headings)
    for layer in result.layers:
        table.add_row(layer.path, layer.type, *_cells(layer))
    return table


def _cells(layer: Layer) -> list[str]:
    gates = layer.gates
    if gates is None:
        return ["none"]
    bounds = "" if gates.lower_bounds is None else f"{gates.lower_bounds.min():.3f} / {gates.lower_bounds.max():.3f}"
    further = ", ".join(f"{name.replace('_', ' ')} {gate.mean:.3f}" for name, gate in gates.gates.items())
    return [
        gates.decay,
        f"{gates.num_heads} x {gates.decays_per_head}",
        f"{gates.summary.mean:.4f}",
        bounds,
        " / ".join(_tokens(value) for value in quantiles(gates.half_life).values()),
        " / ".join(_tokens(value) for value in quantiles(gates.effective_length).values()),
        further,
    ]


def _tokens(value: float) -> str:
    """A number of tokens in three significant digits."""
    if math.isinf(value):
        return "∞"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
