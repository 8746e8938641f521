"""The tables of a sweep: rows of the axes' values, columns of metrics, the best of the axes that are searched."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from megalin.sweep.config import SEARCH, Sweep
from megalin.sweep.order import best_try, ordered_cells
from megalin.sweep.progress import Status
from megalin.sweep.results import Result, field_value, goal_value

NOT_RUN = "not run"


class Spread(NamedTuple):
    """Differences of one run's repetitions."""

    of: str
    """The values of its axes."""
    runs: int
    """Number of the runs."""
    goals: float
    """Largest difference of their goals."""


def table(sweep: Sweep, results: Sequence[Result]) -> tuple[list[str], list[list[str]]]:
    """Headings and rows of text; a row without a result says so. The last rows are repetitions; with one, each other
    row has its rank: one more than the number of rows that are better by at least twice the largest spread."""
    config = sweep.config
    searched = [*config.best_over, *([] if config.search is None else [config.search.axis])]
    shown = [axis for axis in config.axes if axis not in searched]
    columns = config.columns or {config.goal: config.goal}
    ranks = _ranks(sweep, results)
    head = [*shown, *searched, *columns, *(["rank"] if ranks else []), "steps", "ended", "tokens/s"]
    rows = []
    for values in itertools.product(*(config.axes[axis] for axis in shown)):
        chosen = dict(zip(shown, values, strict=True))
        found = [each for each in results if chosen.items() <= each.values.items() and each.stage in ("", SEARCH)]
        best = best_try(sweep, [each for each in found if not each.stage])
        if best is None:
            rows.append([*values, _without_goal(found), *[""] * (len(head) - len(shown) - 1)])
            continue
        tried = [_searched(sweep, axis, best, found) for axis in searched]
        rank = [ranks[best.name]] if ranks else []
        rows.append([*values, *tried, *_cells(best, columns, rank)])
    for result in results:
        if result.stage not in ("", SEARCH):
            names = [result.values[axis] for axis in shown]
            names[-1:] = [f"{name} {result.stage}" for name in names[-1:]]
            tried = [result.values[axis] for axis in searched]
            rows.append([*names, *tried, *_cells(result, columns, [""] if ranks else [])])
    return head, rows


def search_table(sweep: Sweep, results: Sequence[Result]) -> tuple[list[str], list[list[str]]]:
    """Headings and rows of the goals of a search's short runs, a column for each value of its axis."""
    search, axes = sweep.config.search, sweep.config.axes
    assert search is not None
    others = [axis for axis in axes if axis != search.axis]
    rows = []
    for values in itertools.product(*(axes[axis] for axis in others)):
        chosen, row = dict(zip(others, values, strict=True)), list(values)
        for value in axes[search.axis]:
            same = chosen | {search.axis: value}
            found = [each for each in results if each.stage == SEARCH and dict(each.values) == same]
            best = best_try(sweep, found)
            row.append(_without_goal(found) if best is None else _number(goal_value(sweep, best)))
        rows.append(row)
    return [*others, *axes[search.axis]], rows


def notes(sweep: Sweep, results: Sequence[Result]) -> list[str]:
    """Sentences below the table: the spreads of the repetitions, and the runs that are missing."""
    lines = [
        f"Spread of {each.of} over {each.runs} runs: {each.goals:.4g}; runs that differ by less than "
        f"{2 * each.goals:.4g} in {sweep.config.goal} share a rank."
        for each in _spreads(sweep, results)
    ]
    by_name = {each.name: each for each in results}
    missing = [cell.name for cell in ordered_cells(sweep, by_name) if cell is not None and cell.name not in by_name]
    failed = [each.name for each in results if each.status is Status.FAILED]
    for what, names in (("Not run", missing), ("Failed", failed)):
        if names:
            lines.append(f"{what}: {', '.join(names)}.")
    return lines


def markdown(sweep: Sweep, results: Sequence[Result]) -> str:
    """The tables and notes as Markdown."""
    parts = [_markdown_table(*table(sweep, results))]
    parts += [line + "\n" for line in notes(sweep, results)]
    if sweep.config.search is not None:
        head, rows = search_table(sweep, results)
        parts += [
            f"{sweep.config.goal} of the short runs by {sweep.config.search.axis}:\n",
            _markdown_table(head, rows),
        ]
    return "\n".join(parts)


def _markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def _cells(result: Result, columns: Mapping[str, str], rank: Sequence[str]) -> Iterator[str]:
    """The cells after those of the axes."""
    yield from (_number(field_value(result, field)) for field in columns.values())
    yield from rank
    yield f"{result.steps:,}"
    yield result.status.value
    yield "" if result.tokens_per_second is None else f"{result.tokens_per_second:,.0f}"


def _spreads(sweep: Sweep, results: Sequence[Result]) -> Iterator[Spread]:
    """The spread of each run with a repetition."""
    for original in results:
        if not original.stage and original.best:
            repeated = [
                each
                for each in results
                if each.values == original.values and each.stage not in ("", SEARCH) and each.best
            ]
            goals = [goal_value(sweep, each) for each in (original, *repeated)]
            if repeated:
                yield Spread(" ".join(original.values.values()), len(goals), max(goals) - min(goals))


def _ranks(sweep: Sweep, results: Sequence[Result]) -> dict[str, str]:
    """The rank of each run by its name; empty without a repetition."""
    spreads = [each.goals for each in _spreads(sweep, results)]
    if not spreads:
        return {}
    goals = {each.name: sweep.goodness(goal_value(sweep, each)) for each in results if not each.stage and each.best}
    tie = 2 * max(spreads)
    return {
        name: str(1 + sum(other > goal and other - goal >= tie for other in goals.values()))
        for name, goal in goals.items()
    }


def _without_goal(found: Sequence[Result]) -> str:
    """The reason why none of these runs has a goal."""
    statuses = {result.status for result in found if not (result.stage and result.best)}
    if Status.FAILED in statuses:
        return Status.FAILED.value
    return "no goal" if statuses - {Status.CUT} else NOT_RUN


def _searched(sweep: Sweep, axis: str, best: Result, found: Sequence[Result]) -> str:
    """The best value of a searched axis, and how many of its values were run."""
    run = {result.values[axis] for result in found if result.best}
    missing = len(sweep.config.axes[axis]) - len(run)
    return best.values[axis] + (f" ({missing} {NOT_RUN})" if missing else "")


def _number(value: object) -> str:
    return f"{value:.5g}" if isinstance(value, float) else "" if value is None else str(value)
