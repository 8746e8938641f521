"""`megalin ladder`: plans, trains, resumes and lists the runs of a scaling-law ladder."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from megalin.commands.arguments.command import Output
from megalin.commands.outputs import check_output
from megalin.errors import ConfigError, DataError
from megalin.ladder.config import Ladder, parse_ladder
from megalin.ladder.plan import Price, Rung, make_rungs, price, run_config, within
from megalin.ladder.state import check_unchanged
from megalin.ladder.table import PLAN_HEAD, STATUS_HEAD, epoch_line, plan_rows, status_notes, status_rows
from megalin.ladder.worker import run_ladder
from megalin.planner.hardware import hardware_named
from megalin.terminal_output import terminal

_TABLE_WIDTH = 220  # where the output is not a terminal


def run(arguments: argparse.Namespace) -> int:
    """Runs the command and returns the exit code."""
    folder = arguments.folder or Path("runs") / arguments.ladder.stem
    if not (arguments.status or arguments.dry_run):  # these write nothing
        check_output("--folder", str(folder), Output.FOLDER)
    for name in ("budget", "gpu_hours"):
        value = getattr(arguments, name)
        if value is not None and not 0 < value < float("inf"):
            raise ConfigError(f"--{name.replace('_', '-')} {value}: give a positive number")
    ladder = parse_ladder(arguments.ladder)
    rungs = _selected(arguments, make_rungs(ladder))
    check_unchanged(ladder, folder)
    console = Console(file=terminal(), soft_wrap=True, width=None if sys.stdout.isatty() else _TABLE_WIDTH)
    if arguments.status:
        _print(console, STATUS_HEAD, status_rows(folder, rungs))
        for line in status_notes(folder, rungs):
            console.print(line, markup=False, highlight=False)
        return 0
    prices = _prices(arguments, ladder, rungs)
    rungs = _affordable(arguments, rungs, prices)
    longest = max((rung for rung in rungs), key=lambda rung: rung.runs[0].steps * rung.tokens_per_step)
    config = run_config(ladder, longest, longest.runs[0], folder, factor=1.0)
    if arguments.dry_run:
        _print(console, PLAN_HEAD, plan_rows(rungs, [prices[rung.name] for rung in rungs]))
        print(f"hours: one {arguments.gpu}, by the planner; FLOPs and tokens as trained, a trunk's once")
        try:
            print(epoch_line(config, folder))
        except DataError as error:
            print(f"data: {error}")
        return 0
    print(epoch_line(config, folder))
    results = run_ladder(ladder, rungs, folder, processes=arguments.processes, on_line=_print_line)
    return 1 if any(not result.is_done for result in results) else 0


def _selected(arguments: argparse.Namespace, rungs: list[Rung]) -> list[Rung]:
    """The rungs of --rung and --mixer, with the trials of their mixers."""
    mixers = list(dict.fromkeys(rung.mixer for rung in rungs))
    for mixer in arguments.mixer or ():
        if mixer not in mixers:
            raise ConfigError(f"--mixer {mixer}: not in the ladder; use some of {', '.join(mixers)}")
    last = max(rung.number for rung in rungs)
    for number in arguments.rung or ():
        if not 1 <= number <= last:
            raise ConfigError(f"--rung {number}: the ladder has rungs 1 to {last}; --dry-run lists them")
    chosen = [
        rung
        for rung in rungs
        if (arguments.mixer is None or rung.mixer in arguments.mixer)
        and (arguments.rung is None or rung.is_search or rung.number in arguments.rung)
    ]
    needed = {rung.mixer for rung in chosen if not rung.is_search}
    if not needed:
        raise ConfigError("--rung and --mixer have no rung in common; --dry-run lists the rungs of each mixer")
    return [rung for rung in chosen if rung.mixer in needed]


def _prices(arguments: argparse.Namespace, ladder: Ladder, rungs: Sequence[Rung]) -> dict[str, Price]:
    """The planner's price of each rung, where it is printed or limited."""
    hardware = hardware_named(arguments.gpu)
    if not arguments.dry_run and arguments.gpu_hours is None:
        return {}
    return {rung.name: price(ladder, rung, hardware) for rung in rungs}


def _affordable(arguments: argparse.Namespace, rungs: list[Rung], prices: dict[str, Price]) -> list[Rung]:
    """The rungs that fit --budget or --gpu-hours; prints those that do not."""
    if arguments.budget is not None:
        selection = within(rungs, [rung.flops for rung in rungs], arguments.budget, unit="FLOPs")
    elif arguments.gpu_hours is not None:
        hours = [prices[rung.name].hours for rung in rungs]
        selection = within(rungs, hours, arguments.gpu_hours, unit=f"{arguments.gpu}-hours")
    else:
        return rungs
    if selection.left_out:
        print(f"left out by the budget: {', '.join(rung.name for rung in selection.left_out)}")
    return selection.kept


def _print(console: Console, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    table = Table(*head)
    for row in rows:
        table.add_row(*row)
    console.print(table)


def _print_line(line: str) -> None:
    print(line, flush=True)
