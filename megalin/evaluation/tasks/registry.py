"""The generated tasks by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from megalin.config import parse, suggest
from megalin.errors import ConfigError
from megalin.evaluation.tasks.listops import ListOps
from megalin.evaluation.tasks.mqar import MQAR
from megalin.evaluation.tasks.pathfinder import Pathfinder
from megalin.evaluation.tasks.sequence_task import SequenceTask
from megalin.evaluation.tasks.state_tracking import S5, ModularAddition, Palindrome, Parity, Stack


class TaskKind(NamedTuple):
    """A task's class and its description in one line."""

    task: type[SequenceTask]
    description: str


TASKS: Mapping[str, TaskKind] = {
    "mqar": TaskKind(MQAR, "multi-query associative recall: the values of keys that were given before"),
    "parity": TaskKind(Parity, "sum of bits modulo 2"),
    "modular_addition": TaskKind(ModularAddition, "sum of residues modulo m"),
    "s5": TaskKind(S5, "product of permutations of five elements"),
    "palindrome": TaskKind(Palindrome, "a word in reversed order"),
    "stack": TaskKind(Stack, "symbols popped from several stacks"),
    "listops": TaskKind(ListOps, "value of nested MIN, MAX, MED and SM (Long Range Arena)"),
    "pathfinder": TaskKind(Pathfinder, "whether two dots are the ends of one dashed contour (Long Range Arena)"),
}
"""Tasks on token ids, by name."""


def build_task(name: str, values: Mapping[str, Any] | None = None) -> SequenceTask:
    """The task `name` with these fields; the others have their defaults.

    Raises:
        ConfigError: an unknown name, an unknown field, or a value that the task refuses.
    """
    if name not in TASKS:
        raise ConfigError(f"task {name!r}: no such task; {suggest(name, list(TASKS))}")
    return parse(TASKS[name].task, values or {}, f"task {name}")
