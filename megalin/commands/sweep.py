"""`megalin sweep`: trains all runs of a sweep, several at a time, and prints the table of their results."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from megalin.files import storage_errors, write_atomically
from megalin.sweep.config import Sweep
from megalin.sweep.order import read_sweep
from megalin.sweep.progress import Status
from megalin.sweep.results import Result, goal_value
from megalin.sweep.runner import run_sweep
from megalin.sweep.table import markdown, notes, search_table, table
from megalin.terminal_output import terminal

_TABLE_WIDTH = 200  # where the output is not a terminal


def run(arguments: argparse.Namespace) -> int:
    """Runs the command and returns the exit code."""
    width = None if sys.stdout.isatty() else _TABLE_WIDTH
    sweep, console = read_sweep(arguments.sweep), Console(file=terminal(), soft_wrap=True, width=width)

    def on_result(result: Result, left: int, results: list[Result]) -> None:
        found = f", best {goal_value(sweep, result):.4g} at step {result.best['step']}" if result.best else ""
        text = f"{result.steps} steps in {result.seconds:.0f} s{found}"
        console.print(f"{result.title}: {result.status.value}, {text}; {left} left", markup=False, highlight=False)
        if result.error:
            console.print(result.error, markup=False, highlight=False)
        if arguments.markdown is not None:
            _write_markdown(arguments.markdown, sweep, results)

    results = run_sweep(
        sweep,
        arguments.folder,
        processes=arguments.processes,
        time_limit=arguments.time_limit,
        restart_changed=arguments.restart_changed,
        on_result=on_result,
    )
    if arguments.markdown is not None:
        _write_markdown(arguments.markdown, sweep, results)
    tables = [table(sweep, results), *([] if sweep.config.search is None else [search_table(sweep, results)])]
    for head, rows in tables:
        printed = Table(*head)
        for row in rows:
            printed.add_row(*row)
        console.print(printed)
    for line in notes(sweep, results):
        console.print(line, markup=False, highlight=False)
    return 1 if any(result.status is Status.FAILED for result in results) else 0


def _write_markdown(path: Path, sweep: Sweep, results: list[Result]) -> None:
    with storage_errors(path):
        write_atomically(path, markdown(sweep, results).encode())
