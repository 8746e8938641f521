"""`megalin data generate-task`: examples of a generated task as a shard whose labels are the answers alone."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from megalin.config import apply_overrides, parse
from megalin.data.shards.supervised import write_supervised_shard
from megalin.errors import ConfigError
from megalin.evaluation.tasks.mqar import MQAR, MQAR_SETTINGS
from megalin.evaluation.tasks.registry import TASKS, build_task, sequence_tasks
from megalin.evaluation.tasks.sequence_task import SequenceTask, split_seed
from megalin.terminal_output import terminal


def run(args: argparse.Namespace) -> int:
    """Runs the command and returns the exit code."""
    if args.task is None:
        _list()
        return 0
    if args.output is None:
        raise ConfigError("--output is missing; give the prefix of the new shard")
    if args.examples is not None and args.examples < 1:
        raise ConfigError(f"--examples {args.examples}: give at least 1")
    fields = apply_overrides({}, args.overrides)
    if args.setting is not None:
        planned = _setting(args, fields)
    elif args.examples is None:
        raise ConfigError("--examples is missing; give the number of examples")
    else:
        planned = [(args.output, _sequence_task(args.task, fields), args.examples)]
    seed = split_seed(args.seed, args.split)
    for prefix, task, num_examples in planned:
        examples = (task.example(seed, number) for number in range(num_examples))
        shard = write_supervised_shard(prefix, examples, vocab_size=task.num_ids)
        print(f"{shard.prefix}: {shard.documents} examples, {shard.tokens} tokens, {shard.labels} labels")
    return 0


def _sequence_task(name: str, fields: Mapping[str, Any]) -> SequenceTask:
    task = build_task(name, fields)
    if not isinstance(task, SequenceTask):
        raise ConfigError(
            f"task {name!r} is made of text with a tokenizer and writes no shards; "
            f"use one of {', '.join(sequence_tasks())}"
        )
    return task


def _setting(args: argparse.Namespace, fields: Mapping[str, Any]) -> list[tuple[Path, SequenceTask, int]]:
    """(prefix, task, number of examples) of each set."""
    if args.task != "mqar":
        raise ConfigError(f"--setting {args.setting} has no effect on task {args.task!r}; only mqar has settings")
    if args.setting not in MQAR_SETTINGS:
        raise ConfigError(f"--setting {args.setting}: no such setting; use one of {', '.join(MQAR_SETTINGS)}")
    if fixed := sorted({"sequence_length", "num_pairs"} & set(fields)):
        raise ConfigError(f"{fixed[0]} is fixed by --setting {args.setting}; remove one of them")
    planned: list[tuple[Path, SequenceTask, int]] = []
    for task, num_examples in getattr(MQAR_SETTINGS[args.setting], args.split):
        name = f"{task.sequence_length}-{task.num_pairs}"
        changed = parse(MQAR, {**task.model_dump(), **fields}, f"task mqar, set {name}")
        prefix = args.output.with_name(f"{args.output.name}-{name}")
        planned.append((prefix, changed, min(num_examples, args.examples or num_examples)))
    return planned


def _list() -> None:
    table = Table("task", "description", "fields and their defaults", "ids")
    for name in sequence_tasks():
        task = build_task(name)
        assert isinstance(task, SequenceTask)
        fields = ", ".join(f"{key}={value}" for key, value in task.model_dump().items())
        table.add_row(name, TASKS[name].description, fields, str(task.num_ids))
    Console(file=terminal()).print(table)
