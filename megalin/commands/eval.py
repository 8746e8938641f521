"""`megalin eval`: the held-out loss of a saved run, and its results on choice tasks."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping

from rich.console import Console
from rich.table import Column, Table

from megalin.commands.base import steps_option
from megalin.commands.progress import progress_bars
from megalin.config import suggest
from megalin.errors import ConfigError
from megalin.evaluation.choices.metrics import Metric
from megalin.evaluation.choices.suite import DEFAULT_TASKS, ChoiceOptions
from megalin.evaluation.generated.haystack import Haystack
from megalin.evaluation.generated.retrieval import NUM_DEPTHS
from megalin.evaluation.suite import TaskResult
from megalin.evaluation.suites import (
    OTHER_SUITES,
    TASK_SUITES,
    EvalOptions,
    StepResults,
    SuiteOptions,
    evaluate_on_launched_ranks,
)
from megalin.evaluation.task_names import split_name
from megalin.launch import launched
from megalin.terminal_output import terminal

SUITES = ("loss", "choices", *OTHER_SUITES)
_TABLE_WIDTH = 140  # where the output is not a terminal
_COLUMNS = (
    *("acc", "acc_norm", "acc_unconditional", "bits_per_byte", "bits_per_normalized_byte", "greedy_match"),
    *("accuracy", "exact_match", "score", "weighted_average", "niah_score"),
    *("loss", "perplexity", "unigram_entropy"),
)
"""Metrics of the table; --json and the run folder have all."""
_LOSS_SUITES = {"sources": ("source", "tokens"), "positions": ("split", "tokens")}
"""Suites of losses, with the headings of their results and of their numbers of labels."""


def run(arguments: argparse.Namespace) -> int:
    """Runs the command and returns the exit code."""
    options = _options(arguments)
    with progress_bars(shown=launched().rank == 0) as report:
        results = evaluate_on_launched_ranks(arguments.folder, arguments.overrides, options, report)
    if results is None:  # not rank 0
        return 0
    loss_alone = options.choices is None and options.others is None and options.steps != "all"
    if arguments.json:
        values = {str(step): of_step.values() for step, of_step in results.items()}
        if loss_alone:
            (only,) = values.values()
            values = only.pop("loss") | only  # by source, where there are several
        print(json.dumps(values))
    else:
        for step, of_step in results.items():
            _print(None if loss_alone else step, of_step)
    return 0


def _options(arguments: argparse.Namespace) -> EvalOptions:
    """The options of the arguments. Raises ConfigError for those that contradict each other."""
    named = [split_name(name, TASK_SUITES) for name in arguments.tasks or ()]
    tasks: dict[str, list[str]] = {}
    for suite, pattern in named:
        tasks.setdefault(suite or "choices", []).append(pattern)
    suites = [suite for suite, _ in named if suite is not None]
    if arguments.suite is not None or not suites:
        asked = [name.strip() for name in (arguments.suite or "loss").split(",")]
        for name in asked:
            if name not in SUITES:
                raise ConfigError(f"--suite {name}: no such suite; {suggest(name, SUITES)}")
        suites = asked + suites
    suites = list(dict.fromkeys(suites))
    others = [name for name in suites if name in OTHER_SUITES]
    readers = {
        "data": ["choices"],
        "limit": ["choices", *OTHER_SUITES],
        "lengths": ["needle", "ruler"],
        "depths": ["needle"],
        "haystack": ["needle"],
    }
    for name, read_by in readers.items():
        if getattr(arguments, name) is not None and not set(read_by) & set(suites):
            known = " or ".join(read_by)
            raise ConfigError(f"--{name} has no effect without the suite {known}; add --suite {read_by[0]}")
    if "choices" in tasks and "choices" not in suites:
        raise ConfigError("--tasks has no effect without the suite choices; add --suite choices, or use SUITE:TASK")
    choices = None
    if "choices" in suites:
        choices = ChoiceOptions(arguments.data, tasks.get("choices", DEFAULT_TASKS), arguments.limit)
    depths = NUM_DEPTHS if arguments.depths is None else arguments.depths
    haystack: Haystack = arguments.haystack or "noise"
    further = SuiteOptions(others, arguments.limit, arguments.lengths, depths, arguments.split, haystack, tasks)
    split = arguments.split if "loss" in suites else None
    return EvalOptions(split, choices, steps_option(arguments), further if others else None)


def _print(step: int | None, results: StepResults) -> None:
    """Prints the results of a checkpoint, under its step where one is given."""
    if step is not None:
        print(f"step {step}")
    if results.loss is not None:
        print("\n".join(results.loss.report_lines()))
    for suite, tasks in results.tasks.items():
        Console(file=terminal(), width=None if sys.stdout.isatty() else _TABLE_WIDTH).print(_table(suite, tasks))


def _table(suite: str, results: Mapping[str, TaskResult]) -> Table:
    """The metrics of a suite's tasks, with their standard errors."""
    names = dict.fromkeys(name for result in results.values() for name in result.metrics)
    shown = [name for name in _COLUMNS if name in names] + [name for name in names if name[0].isdigit()]
    affected = [name for name in ("truncated", "merged") if any(_affected(each, name) for each in results.values())]
    task_heading, count_heading = _LOSS_SUITES.get(suite, ("task", "questions"))
    decimals = 4 if suite in _LOSS_SUITES else 3  # 4 as in the loss of the whole
    table = Table(
        Column(task_heading, no_wrap=True),
        count_heading,
        *(name.replace("_", " ") for name in shown),
        *affected,
    )
    for task, result in results.items():
        whole = result.num_questions == result.num_questions_in_file
        counts = f"{result.num_questions}" + ("" if whole else f" of {result.num_questions_in_file}")
        cells = [_value(result.metrics[name], decimals) if name in result.metrics else "" for name in shown]
        requests = [f"{_affected(result, name)} of {result.num_requests}" for name in affected]
        table.add_row(task.replace("[", r"\["), counts, *cells, *requests)
    return table


def _affected(result: TaskResult, name: str) -> int:
    """Requests that were truncated, or whose answer merges with its prompt."""
    return {"truncated": result.num_truncated, "merged": result.num_merged}[name]


def _value(metric: Metric, decimals: int) -> str:
    """A metric with its standard error, if it has one."""
    error = f" ± {metric.standard_error:.{decimals}f}" if metric.standard_error else ""
    return f"{metric.value:.{decimals}f}{error}"
