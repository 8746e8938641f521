"""The papers' recipes: heads, resolved configs, and counts of docs/recipes.md."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from functools import cache
from pathlib import Path

import pytest

from megalin.__main__ import main
from megalin.commands.arguments.parser import build_parser
from megalin.config import dumps, parse
from megalin.model.build import make_model
from megalin.model.config import parse_model
from megalin.reproduce.computed import row_model
from megalin.reproduce.papers import load_table
from megalin.train.config import RunConfig, load_run_config

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "recipes"
RECIPES = sorted(path.relative_to(FOLDER) for path in FOLDER.glob("*/*.toml") if path.stem != "common")
PAGE = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
ROWS = {
    Path(target): cells.split(" | ")
    for target, cells in re.findall(
        r"^\| \[[\w.+-]+\]\(\.\./examples/recipes/([^)]+)\) \| (.*) \|$", PAGE, re.MULTILINE
    )
}
every_recipe = pytest.mark.parametrize("recipe", RECIPES, ids=str)


@cache
def resolved(recipe: Path) -> RunConfig:
    return load_run_config(FOLDER / recipe, [])


@cache
def num_parameters(model: str) -> int:
    """Parameters of a model's JSON, built without values; many recipes share a model."""
    return make_model(parse_model(json.loads(model), "recipe")).num_parameters()


def head(recipe: Path) -> str:
    """The comment at the top of a recipe, as one line."""
    lines = (FOLDER / recipe).read_text(encoding="utf-8").splitlines()
    return " ".join(line.removeprefix("#").strip() for line in lines[: lines.index("")])


def test_the_page_has_every_recipe():
    assert set(ROWS) == set(RECIPES)
    assert len(RECIPES) >= 40


def test_run_folders_differ():
    """By default a run's folder has the name of its config."""
    assert len({recipe.stem for recipe in RECIPES}) == len(RECIPES)


@every_recipe
def test_recipe_resolves_and_has_the_parameters_of_the_page(recipe: Path):
    assert f"{num_parameters(resolved(recipe).model.model_dump_json()) / 1e6:.1f}M" == ROWS[recipe][1]


@every_recipe
def test_head_and_commands(recipe: Path):
    """The head names sources, goal and command; the commands of `preparation` make the shards."""
    text, config = head(recipe), resolved(recipe)
    assert "rinted" in text
    assert "urs" in text
    assert "Aims at" in text
    command = re.search(rf"(\d*) -m megalin train examples/recipes/{re.escape(str(recipe))}(\s|$)", text)
    assert command
    assert config.train.global_batch_size % (config.train.micro_batch_size * int(command[1] or 1)) == 0
    data = config.data
    prefixes = {path.removesuffix("_text_document") for path in [*data.training_paths(), *data.validation, *data.test]}
    outputs = {output for line in data.preparation for output in re.findall(r"--output(?:-prefix)? (\S+)", line)}
    assert {output for output in outputs if not output.endswith(".json")} == prefixes
    for line in data.preparation:
        program, *arguments = shlex.split(line)
        assert program == "megalin"
        assert build_parser().parse_args(arguments).command, line


def test_stages_start_from_the_runs_of_other_recipes():
    """The run folder of the stage before, which has the same model with fewer positions."""
    sources = {recipe: resolved(recipe).train.initial_weights for recipe in RECIPES}
    stages = {recipe: source for recipe, source in sources.items() if source is not None}
    assert len(stages) == 6
    for recipe, source in stages.items():
        before, after = resolved(recipe.with_name(f"{Path(source).name}.toml")), resolved(recipe)
        assert source == f"runs/{Path(source).name}"
        assert before.data.sequence_length < after.data.sequence_length
        positions = {"max_positions": after.data.sequence_length}
        assert before.model.model_copy(update=positions) == after.model


def test_a_decay_along_values_is_the_row_of_table_16():
    """`megalin reproduce rodimus 16` finds the row of a run of the recipe by its model."""
    row = next(row for row in load_table("rodimus", "16").rows if row.name == "product of beta_j")
    assert row_model(row) == resolved(Path("rodimus/recurrence-values-wikitext103.toml")).model


def assert_printed_config_is_the_recipe(recipe: Path, printed: str) -> None:
    values = tomllib.loads(printed)
    assert parse(RunConfig, values, str(recipe)) == resolved(recipe)


def test_config_prints_a_recipe(capsys: pytest.CaptureFixture[str]):
    recipe = RECIPES[0]
    assert main(["config", str(FOLDER / recipe)]) == 0
    assert_printed_config_is_the_recipe(recipe, capsys.readouterr().out)


@pytest.mark.slow
@every_recipe
def test_printed_config_is_the_recipe(recipe: Path):
    assert_printed_config_is_the_recipe(recipe, dumps(resolved(recipe)))


def test_missing_shards_name_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.chdir(tmp_path)
    recipe = str(FOLDER / "scaling-laws" / "tnl-70m.toml")
    small = ["model.preset=tnl-tiny", "train.compile=false", "train.micro_batch_size=1"]
    assert main(["train", recipe, *small]) == 3
    assert "Make them with\n  megalin data preprocess --input 'corpus/*.jsonl.zst'" in capsys.readouterr().err
