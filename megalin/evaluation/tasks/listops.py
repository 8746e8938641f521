"""ListOps (Long Range Arena): nested lists of digits under MIN, MAX, MED and SM, whose value is the class."""

from __future__ import annotations

from typing import Self

import pydantic

from megalin.errors import ConfigError
from megalin.evaluation.tasks.draws import ExampleDraws
from megalin.evaluation.tasks.sequence_task import LabelledSequence, SequenceTask, labelled

OPERATORS = ("MIN", "MAX", "MED", "SM")
SYMBOLS = (*"0123456789", *(f"[{operator}" for operator in OPERATORS), "]", "=")
"""Text of each id."""
CLOSE, EQUALS = SYMBOLS.index("]"), SYMBOLS.index("=")
_FIRST_OPERATOR = SYMBOLS.index("[MIN")
_MOST_TRIES = 100_000


class ListOps(SequenceTask):
    """An expression, "=" and its value, the label: [MAX 4 3 [MIN 2 3 ] 1 ] = 4.

    The root is a list. An argument is a list with probability `list_probability`, unless it is `max_depth` deep, and
    else a digit; a list has 2 to `max_arguments` arguments. Expressions are drawn until one has `min_length` to
    `max_length` tokens. MED of an even number of arguments is the mean of the two in the middle, rounded down; SM is
    the sum modulo 10. Ids: SYMBOLS.

    Source: Nangia and Bowman, ListOps (2018); Tay et al., Long Range Arena (2020), whose choices are the defaults.
    """

    min_length: int = pydantic.Field(default=500, ge=4)
    """Least number of tokens of an expression, brackets included."""
    max_length: int = pydantic.Field(default=2000, ge=4)
    """Largest number of tokens of an expression; an example has two more."""
    max_depth: int = pydantic.Field(default=10, ge=2)
    """Largest depth of a digit or a list; the root has depth 1. Lists have at most max_depth - 1."""
    max_arguments: int = pydantic.Field(default=10, ge=2)
    """Largest number of arguments of a list."""
    list_probability: float = pydantic.Field(default=0.25, gt=0, le=1)
    """Probability that an argument is a list."""

    @pydantic.model_validator(mode="after")
    def _lengths_rise(self) -> Self:
        if self.min_length > self.max_length:
            raise ValueError(f"min_length = {self.min_length} is above max_length = {self.max_length}; lower it")
        return self

    @property
    def num_ids(self) -> int:
        """Number of token ids."""
        return len(SYMBOLS)

    def example(self, seed: int, number: int) -> LabelledSequence:
        """Example `number`: an expression, "=" and the label.

        Raises:
            ConfigError: 100,000 expressions in a row do not have the asked length.
        """
        draws = ExampleDraws("listops", seed, number)
        for _ in range(_MOST_TRIES):
            tokens: list[int] = []
            value = self._append_list(draws, tokens, depth=1)
            if value is not None and len(tokens) >= self.min_length:
                return labelled([*tokens, EQUALS], [value])
        raise ConfigError(
            f"listops: {_MOST_TRIES} random expressions, none with min_length = {self.min_length} to max_length = "
            f"{self.max_length} tokens; widen this range, or raise max_depth, max_arguments or list_probability"
        )

    def _append_list(self, draws: ExampleDraws, tokens: list[int], *, depth: int) -> int | None:
        """Appends a random list to `tokens` and returns its value; None once the expression is too long."""
        operator = draws.integer(0, len(OPERATORS) - 1)
        tokens.append(_FIRST_OPERATOR + operator)
        values = []
        for _ in range(draws.integer(2, self.max_arguments)):
            value: int | None
            if depth + 1 < self.max_depth and draws.fraction() < self.list_probability:
                value = self._append_list(draws, tokens, depth=depth + 1)
            else:
                value = draws.integer(0, 9)
                tokens.append(value)
            if value is None or len(tokens) >= self.max_length:
                return None
            values.append(value)
        tokens.append(CLOSE)
        return _apply(OPERATORS[operator], values)


def _apply(operator: str, values: list[int]) -> int:
    if operator == "MIN":
        return min(values)
    if operator == "MAX":
        return max(values)
    if operator == "SM":
        return sum(values) % 10
    ordered = sorted(values)
    return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) // 2
