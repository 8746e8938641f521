"""The generated tasks by name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from megalin.config import parse, suggest
from megalin.errors import ConfigError
from megalin.evaluation.tasks.listops import ListOps
from megalin.evaluation.tasks.mqar import MQAR
from megalin.evaluation.tasks.needle import Needle
from megalin.evaluation.tasks.pathfinder import Pathfinder
from megalin.evaluation.tasks.ruler import CommonWords, FrequentWords, MultikeyNeedle, NoiseNeedle, VariableTracking
from megalin.evaluation.tasks.sequence_task import SequenceTask
from megalin.evaluation.tasks.state_tracking import S5, ModularAddition, Palindrome, Parity, Stack
from megalin.evaluation.tasks.text_task import TextTask


class TaskKind(NamedTuple):
    """A task's class, its description in one line, and the fields that its name fixes."""

    task: type[SequenceTask] | type[TextTask]
    description: str
    fields: Mapping[str, Any] = MappingProxyType({})


TASKS: Mapping[str, TaskKind] = {
    "mqar": TaskKind(MQAR, "multi-query associative recall: the values of keys that were given before"),
    "parity": TaskKind(Parity, "sum of bits modulo 2"),
    "modular_addition": TaskKind(ModularAddition, "sum of residues modulo m"),
    "s5": TaskKind(S5, "product of permutations of five elements"),
    "palindrome": TaskKind(Palindrome, "a word in reversed order"),
    "stack": TaskKind(Stack, "symbols popped from several stacks"),
    "listops": TaskKind(ListOps, "value of nested MIN, MAX, MED and SM (Long Range Arena)"),
    "pathfinder": TaskKind(Pathfinder, "whether two dots are the ends of one dashed contour (Long Range Arena)"),
    "needle": TaskKind(Needle, "one fact at a given depth of a haystack (S-RT)"),
    "multi_needle": TaskKind(Needle, "three facts in a haystack, all asked for (M-RT)", {"num_needles": 3}),
    "niah_single_1": TaskKind(NoiseNeedle, "one fact at a random place of noise (RULER)"),
    "niah_multikey_2": TaskKind(MultikeyNeedle, "one of many facts about words (RULER)", {"kind": "words"}),
    "niah_multikey_3": TaskKind(MultikeyNeedle, "one of many facts about uuids (RULER)", {"kind": "uuids"}),
    "variable_tracking": TaskKind(VariableTracking, "all variables that have a value through a chain (RULER)"),
    "common_words": TaskKind(CommonWords, "the ten words that stand often in a list (RULER)"),
    "frequent_words": TaskKind(FrequentWords, "the three most frequent words of a text (RULER)"),
}
"""The tasks by name: those on token ids, whose sequences train models too, and those on text."""


def build_task(name: str, values: Mapping[str, Any] | None = None) -> SequenceTask | TextTask:
    """The task `name` with these fields; the others have their defaults.

    Raises:
        ConfigError: an unknown name, an unknown field, or a value that the task refuses.
    """
    if name not in TASKS:
        raise ConfigError(f"task {name!r}: no such task; {suggest(name, list(TASKS))}")
    kind = TASKS[name]
    return parse(kind.task, {**kind.fields, **(values or {})}, f"task {name}")


def sequence_tasks() -> list[str]:
    """Names of the tasks on token ids."""
    return [name for name, kind in TASKS.items() if issubclass(kind.task, SequenceTask)]


def text_tasks() -> list[str]:
    """Names of the tasks on text."""
    return [name for name, kind in TASKS.items() if issubclass(kind.task, TextTask)]
