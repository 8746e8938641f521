"""`megalin sweep`: trains all runs of a sweep, several at a time, and prints the table of their results."""

from __future__ import annotations

import argparse
from pathlib import Path

from megalin.commands.base import Command


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("sweep", type=Path, help="a sweep's file, such as examples/tasks/mqar_sweep.toml")
    parser.add_argument("--folder", type=Path, required=True, help="folder of the runs; started again, it goes on")
    parser.add_argument("--processes", type=int, default=1, help="runs at a time (1); GPUs are shared among them")
    parser.add_argument("--time-limit", type=float, metavar="SECONDS", help="then save and end the runs in progress")


def _run(arguments: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.table import Table

    from megalin.sweep.config import read_sweep
    from megalin.sweep.progress import Status
    from megalin.sweep.runner import Result, run_sweep
    from megalin.sweep.table import goal_value, table

    sweep, console = read_sweep(arguments.sweep), Console(soft_wrap=True)

    def on_result(result: Result, left: int) -> None:
        found = f", best {goal_value(sweep, result):.4g} at step {result.best['step']}" if result.best else ""
        name, text = " ".join(result.values.values()), f"{result.steps} steps in {result.seconds:.0f} s{found}"
        console.print(f"{name}: {result.status.value}, {text}; {left} left", markup=False, highlight=False)
        if result.error:
            console.print(result.error, markup=False, highlight=False)

    results = run_sweep(
        sweep,
        arguments.folder,
        processes=arguments.processes,
        time_limit=arguments.time_limit,
        on_result=on_result,
    )
    head, rows = table(sweep, results)
    printed = Table(*head)
    for row in rows:
        printed.add_row(*row)
    console.print(printed)
    return 1 if any(result.status is Status.FAILED for result in results) else 0


COMMAND = Command("train the runs of a sweep, several at a time, and compare them", _add_arguments, _run)
