"""The table of a sweep: rows of the axes' values, columns of metrics, the best of the axes that are searched."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from megalin.sweep.config import Sweep, metric_name
from megalin.sweep.progress import Status
from megalin.sweep.runner import Result

NOT_RUN = "not run"


def table(sweep: Sweep, results: Sequence[Result]) -> tuple[list[str], list[list[str]]]:
    """Headings and rows of text; a row without a result says so."""
    config = sweep.config
    shown = [axis for axis in config.axes if axis not in config.best_over]
    columns = config.columns or {config.goal: config.goal}
    head = [*shown, *config.best_over, *columns, "steps", "ended", "tokens/s"]
    rows = []
    for values in itertools.product(*(config.axes[axis] for axis in shown)):
        chosen = dict(zip(shown, values, strict=True))
        found = [result for result in results if chosen.items() <= result.values.items()]
        best = max((result for result in found if result.best), key=lambda each: goal_value(sweep, each), default=None)
        if best is None:
            rows.append([*values, _without_goal(found), *[""] * (len(head) - len(shown) - 1)])
            continue
        searched = [_searched(sweep, axis, best, found) for axis in config.best_over]
        metrics = [_number(best.best.get(metric_name(field, best.values))) for field in columns.values()]
        rate = "" if best.tokens_per_second is None else f"{best.tokens_per_second:,.0f}"
        rows.append([*values, *searched, *metrics, f"{best.steps:,}", best.status.value, rate])
    return head, rows


def goal_value(sweep: Sweep, result: Result) -> float:
    """The best goal of a run that was evaluated."""
    return float(result.best[metric_name(sweep.config.goal, result.values)])


def _without_goal(found: Sequence[Result]) -> str:
    """The reason why none of these runs has a goal."""
    statuses = {result.status for result in found}
    if Status.FAILED in statuses:
        return Status.FAILED.value
    return "no goal" if statuses - {Status.CUT} else NOT_RUN


def _searched(sweep: Sweep, axis: str, best: Result, found: Sequence[Result]) -> str:
    """The best value of a searched axis, and how many of its values were run."""
    run = {result.values[axis] for result in found if result.best}
    missing = len(sweep.config.axes[axis]) - len(run)
    return best.values[axis] + (f" ({missing} {NOT_RUN})" if missing else "")


def _number(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value)
