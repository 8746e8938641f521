"""The papers' recipes: heads, resolved configs, counts of docs/recipes.md, and runs of shrunk models."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from functools import cache
from pathlib import Path

import pytest
import torch

from megalin.__main__ import main
from megalin.commands.arguments.parser import build_parser
from megalin.config import dumps, parse
from megalin.data.shards.label_mask import label_mask_path
from megalin.model.build import make_model
from megalin.model.config import EncoderConfig, parse_model
from megalin.parallel.process_group import process_group
from megalin.reproduce.computed import row_model
from megalin.reproduce.papers import load_table
from megalin.train.config import RunConfig, load_run_config
from megalin.train.loop import train
from megalin.verify.case import shrink
from tests.data.shard_files import mask_bytes
from tests.model_runs import CPU, documents, write_shard

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
FAST = [
    "scaling-laws/tnl-1b.toml",
    "hgrn2/hgrn2-44m-wikitext103.toml",
    "transnormerllm/mix-385m.toml",
    "denseattention/listops-danet.toml",
    "rodimus/rodimus_plus-reversed-wikitext103.toml",
]
"""Recipes whose shrunk models train in the fast tests: one of each paper."""
VOCABULARY = 300
"""Ids of a shrunk model."""

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


def shrunk(config: RunConfig, folder: Path) -> RunConfig:
    """The run with its blocks at a small size, on a small shard: three steps of two samples on a CPU."""
    encoder = isinstance(config.model, EncoderConfig)
    train_prefix = str(folder / "shard")
    made = documents(600, seed=1)
    if (classes := config.data.classification) is not None:
        made = [[*each[:40], classes.first_class_id + i % classes.num_classes] for i, each in enumerate(made)]
    write_shard(Path(train_prefix), made)
    if classes is not None:  # the last token of a document is its class
        last = [place == len(each) - 1 for each in made for place in range(len(each))]
        label_mask_path(train_prefix).write_bytes(mask_bytes(last))
    data = {"train": [train_prefix], "validation": [], "test": [], "validation_fraction": 0.2, "tokenizer": None}
    data |= {"sequence_length": 48, "sources": [], "preparation": [], "packing": "concatenate"}
    if config.data.masking is not None:
        ids = {name: 257 + i for i, name in enumerate(("cls_token", "sep_token", "mask_token", "pad_token"))}
        data["masking"] = config.data.masking.model_copy(update={**ids, "max_predictions": 4})
    model = shrink(config.model, 1)
    assert model.vocab_size == VOCABULARY
    loop = {"steps": 3, "global_batch_size": 2, "micro_batch_size": 1, "evaluate_every_steps": None}
    loop |= {"evaluate_batches": 1, "compile": False, "dtype": "float32", "initial_weights": None}
    warmup = min(config.schedule.warmup_steps, 1)
    schedule = {"warmup_steps": warmup, "decay_steps": 1 if config.schedule.decay_steps else None}
    return RunConfig(
        model=model.model_copy(update={"max_positions": 48}) if encoder else model,
        data=config.data.model_copy(update=data),
        train=config.train.model_copy(update=loop),
        optimizer=config.optimizer,
        schedule=config.schedule.model_copy(update=schedule),
        checkpoint=config.checkpoint.model_copy(update={"every_steps": None}),
    )


def assert_trains(recipe: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megalin.train.loop.write_loss_curve", lambda *args, **kwargs: None)
    with process_group(CPU):
        result = train(shrunk(resolved(recipe), folder), CPU, folder / "run")
    assert result.step == 3
    assert result.loss is not None
    assert torch.isfinite(torch.tensor(result.loss))


@pytest.mark.parametrize("recipe", [Path(name) for name in FAST], ids=str)
def test_shrunk_model_of_a_recipe_trains(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert_trains(recipe, tmp_path, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [each for each in RECIPES if str(each) not in FAST], ids=str)
def test_every_shrunk_model_trains(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert_trains(recipe, tmp_path, monkeypatch)


def test_missing_shards_name_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.chdir(tmp_path)
    recipe = str(FOLDER / "scaling-laws" / "tnl-70m.toml")
    small = ["model.preset=tnl-tiny", "train.compile=false", "train.micro_batch_size=1"]
    assert main(["train", recipe, *small]) == 3
    assert "Make them with\n  megalin data preprocess --input 'corpus/*.jsonl.zst'" in capsys.readouterr().err
