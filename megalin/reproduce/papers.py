"""Published tables: papers/*.toml, one file a paper, with the numbers as printed and the way to our own."""

from __future__ import annotations

import tomllib
from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable

import pydantic

from megalin.config import Config, parse, suggest
from megalin.errors import ConfigError

Published = int | float | str
"""A printed number, or a text such as a model's configuration; "-" where the paper prints none."""


class Column(Config):
    """A quantity of a table."""

    name: str
    unit: str
    measure: str | None = None
    """Source of our number: a name of `computed.MEASURES` or `runs.MEASURES`, `computed.PLANNED`, "mean", or
    "SUITE TASK METRIC", the result of an evaluation in a run folder. Left out: none, for `reason`."""
    scale: float = 1.0
    """Our number is divided by it to have the unit."""
    length: int | None = None
    """Tokens per sequence, for operations and caches; the row's `length` comes first."""
    tokens: int = 1
    """Factor of a number a token, for example the tokens of a step."""
    baseline: str | None = None
    """Preset whose number ours is divided by."""
    columns: list[str] = pydantic.Field(default=[])
    """Names of the columns of a "mean"."""
    reason: str | None = None
    """Reason why there is no number of ours, or the way to one."""

    @pydantic.model_validator(mode="after")
    def _has_a_source(self) -> Column:
        if (self.measure is None) == (self.reason is None):
            raise ValueError(f"column {self.name!r}: give either measure or reason")
        return self


class Row(Config):
    """A row of a table."""

    name: str
    published: list[Published]
    """A value a column."""
    preset: str | None = None
    """Our model of this row."""
    overrides: list[str] = pydantic.Field(default=[])
    """Changes to the preset, as key=value without `model.` in front."""
    length: int | None = None
    """Tokens per sequence; a run matches only if it trains on as many."""
    tp: int = 1
    """Size of the tensor-parallel group, for planned memory."""
    reason: str | None = None
    """Reason why we have no such model."""


class Table(Config):
    """A table of a paper."""

    title: str
    notes: list[str] = pydantic.Field(default=[])
    columns: list[Column]
    rows: list[Row]

    @pydantic.model_validator(mode="after")
    def _rows_are_complete(self) -> Table:
        for row in self.rows:
            if len(row.published) != len(self.columns):
                raise ValueError(f"row {row.name!r}: {len(row.published)} values for {len(self.columns)} columns")
            if (row.preset is None) == (row.reason is None):
                raise ValueError(f"row {row.name!r}: give either preset or reason")
        return self


class Paper(Config):
    """A paper and its tables."""

    title: str
    tables: dict[str, Table]


def paper_names() -> list[str]:
    """The names of all papers."""
    files = (file.name for file in _folder().iterdir())
    return sorted(name.removesuffix(".toml") for name in files if name.endswith(".toml"))


@cache
def load_paper(name: str) -> Paper:
    """The paper `name`. Raises ConfigError for a name that does not exist."""
    if name not in paper_names():
        raise ConfigError(f"paper {name!r}: there is no such paper here; {suggest(name, paper_names())}")
    return parse(Paper, tomllib.loads((_folder() / f"{name}.toml").read_text(encoding="utf-8")), f"papers/{name}.toml")


def load_table(paper: str, table: str) -> Table:
    """A table of a paper. Raises ConfigError for a name that does not exist."""
    tables = load_paper(paper).tables
    if table not in tables:
        raise ConfigError(f"paper {paper!r} has no table {table!r} here; {suggest(table, list(tables))}")
    return tables[table]


def _folder() -> Traversable:
    return resources.files("megalin.reproduce") / "papers"
