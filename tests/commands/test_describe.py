"""`megalin config`, `megalin params` and parsing of the command line."""

from __future__ import annotations

import gc
import json
import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest

from megalin.__main__ import main
from megalin.config import dumps, parse
from megalin.model.presets import load_preset, preset_names
from megalin.train.config import RunConfig, load_run_config

ROOT = Path(__file__).parents[2]
COUNTS = ("parameters", "non_embedding_parameters", "flops_per_token", "forward_flops_per_token", "state_bytes")


def test_config_command_prints_what_it_reads_back(config, capsys, tmp_path):
    overrides = ["train.steps=100", "train.dtype=bfloat16", "parallel.shard=1"]
    assert main(["config", str(config), *overrides]) == 0
    text = capsys.readouterr().out
    resolved = tmp_path / "resolved.toml"
    resolved.write_text(text)
    expected = load_run_config(config, overrides)
    assert load_run_config(resolved, []) == expected
    assert parse(RunConfig, tomllib.loads(dumps(expected)), "test") == expected
    assert (expected.train.steps, expected.train.dtype, expected.parallel.shard) == (100, "bfloat16", 1)


def test_run_folder_keeps_the_resolved_config(config, trained):
    assert load_run_config(trained / "config.toml", []) == load_run_config(config, [])


def test_config_writes_a_preset_out(config, capsys):
    text = config.read_text()
    start, end = text.index("[model]"), text.index("[data]")
    path = config.with_name("preset.toml")
    path.write_text(text[:start] + '[model]\npreset = "transnormerllm-385m-64k"\ninit_std = 0.01\n\n' + text[end:])
    assert main(["config", str(path)]) == 0
    table = tomllib.loads(capsys.readouterr().out)["model"]
    assert (table["vocab_size"], table["hidden_size"], table["init_std"]) == (64000, 1024, 0.01)
    assert "preset" not in table


def _unknown_keys(value: Any, schema: dict[str, Any], definitions: dict[str, Any], path: str) -> list[str]:
    """Paths of a TOML value that no alternative of a schema knows."""
    if "$ref" in schema:
        schema = definitions[schema["$ref"].rpartition("/")[2]]
    if "anyOf" in schema:
        return min((_unknown_keys(value, option, definitions, path) for option in schema["anyOf"]), key=len)
    if isinstance(value, list):
        items = schema.get("items", {})
        return [key for each in value for key in _unknown_keys(each, items, definitions, path)]
    if not isinstance(value, dict):
        fits = schema.get("const", value) == value and value in schema.get("enum", [value])
        return [] if fits and re.search(schema.get("pattern", ""), str(value)) else [path]
    known = schema.get("properties", {})
    free = schema.get("additionalProperties", True) is not False
    found = [f"{path}.{key}" for key in value if key not in known and not free]
    for key in value.keys() & known.keys():
        found += _unknown_keys(value[key], known[key], definitions, f"{path}.{key}")
    return found


def test_schema_knows_the_keys_of_every_example(capsys):
    assert main(["config", "--schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    examples = [path for path in (ROOT / "examples").glob("*/*.toml") if "[model]" in path.read_text()]
    assert len(examples) > 6
    for path in examples:
        assert _unknown_keys(tomllib.loads(path.read_text()), schema, schema["$defs"], "") == [], path
    wrong = {"model": {"layers": [{"sublayers": [{"type": "hgrn2", "num_hads": 2}]}]}, "train": {"step": 1}}
    found = sorted(_unknown_keys(wrong, schema, schema["$defs"], ""), reverse=True)
    assert found == [".train.step", ".model.layers.sublayers.num_hads"]


def test_config_prints_a_config_or_the_schema(config, fails):
    assert "give a config file, or --schema" in fails(2, "config")
    assert "give a config file, or --schema" in fails(2, "config", config, "--schema")


def test_a_shell_completes_commands_and_options(capsys, tmp_path):
    assert main(["completion", "bash"]) == 0
    (tmp_path / "completion").write_text(capsys.readouterr().out)
    (function,) = set(re.findall(r"-F (\w+) megalin$", (tmp_path / "completion").read_text(), re.MULTILINE))
    for words, expected in ((["swe"], "sweep"), (["data", "pre"], "preprocess"), (["eval", "--sui"], "--suite")):
        line = " ".join(words)
        program = f"source {tmp_path}/completion; COMP_WORDS=(megalin {line}); COMP_CWORD={len(words)}; {function}"
        done = subprocess.run(["bash", "-c", f"{program}; echo ${{COMPREPLY[@]}}"], capture_output=True, text=True)
        assert done.stdout.split() == [expected]


@pytest.mark.parametrize("preset", preset_names())
def test_params_of_every_preset(preset, capsys):
    assert main(["params", preset, "--json", "--length", "2048"]) == 0
    counts = json.loads(capsys.readouterr().out)
    assert counts["model"] == preset
    assert counts["length"] == 2048
    model = load_preset(preset).model
    if model.kind == "encoder":
        assert "state_bytes" not in counts
        rows = model.vocab_size + model.max_positions + model.num_token_types
    else:
        # The softmax baseline has no state before its first token, and then a cache that grows.
        softmax = all(block.sublayers[0].type == "softmax" for block in model.layers)
        assert (counts["state_bytes"] > 0) is not softmax
        rows = (1 if model.tie_embeddings else 2) * model.vocab_size
    assert all(isinstance(counts[name], int) for name in COUNTS if name in counts)
    assert counts["parameters"] - counts["non_embedding_parameters"] == rows * model.hidden_size
    assert counts["flops_per_token"] == 3 * counts["forward_flops_per_token"]
    assert counts["forward_flops_per_token"] > 2 * counts["non_embedding_parameters"]


def test_params_prints_for_people_and_takes_overrides(capsys):
    assert main(["params", "transnormerllm-385m-64k"]) == 0
    text = capsys.readouterr().out
    assert "state_bytes" in text
    assert load_preset("transnormerllm-385m-64k").note in text
    assert main(["params", "transnormerllm-385m-64k", "model.vocab_size=1000", "--json"]) == 0
    smaller = json.loads(capsys.readouterr().out)
    assert smaller["parameters"] - smaller["non_embedding_parameters"] == 1000 * 1024


def test_params_without_a_model_lists_the_presets(capsys, monkeypatch):
    names = ["hgrn2-1b", "hgrn2-tiny"]
    monkeypatch.setattr("megalin.commands.params.preset_families", lambda: {"hgrn2": names})
    assert main(["params"]) == 0
    text = capsys.readouterr().out
    assert re.findall(r"│ (hgrn2-\S+) ", text) == names
    assert re.search(r"hgrn2-1b +│ +1\.06 B │ 24\.0 MiB │ Scaling-laws ladder, parameters and operations as its", text)
    assert main(["params", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert main(["params", "hgrn2-1b", "--json"]) == 0
    alone = json.loads(capsys.readouterr().out)
    (found,) = [each for each in listed if each["model"] == "hgrn2-1b"]
    assert found == alone | {"family": "hgrn2", "source": load_preset("hgrn2-1b").note}


def test_params_counts_at_the_length_of_the_config(config, capsys):
    def length(*arguments: str) -> int:
        assert main(["params", str(config), "--json", *arguments]) == 0
        return json.loads(capsys.readouterr().out)["length"]

    assert length() == load_run_config(config, []).data.sequence_length
    assert length("--length", "100") == 100


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["transnormerllm-385"], "there is no such preset; did you mean 'transnormerllm-385m'?"),
        (["transnormerllm-385m", "vocab_size=3"], "'vocab_size' is not read here; known: model.*"),
        (["transnormerllm-385m", "model.vocab_sise=3"], "vocab_sise: unknown key; did you mean 'vocab_size'?"),
        (["transnormerllm-385m", "--length", "0"], "--length 0: a sequence has at least 1 token"),
    ],
)
def test_params_refuses(fails, arguments, message):
    assert message in fails(2, "params", *arguments)


def test_model_that_is_no_table_is_refused(fails, tmp_path):
    (tmp_path / "config.toml").write_text("model = 3\n")
    assert "model = 3 is not a table; write it as [model]" in fails(2, "params", tmp_path / "config.toml")


def test_collections_go_on_once_torch_is_loaded(monkeypatch):
    monkeypatch.setattr(gc, "freeze", lambda: None)  # this process has more objects than torch's
    gc.disable()
    try:
        main(["params", "hgrn2-tiny"])
        assert gc.isenabled()
    finally:
        gc.enable()


def test_overrides_may_stand_before_and_after_options(config, trained, capsys):
    for arguments in (["train.steps=7", "--folder", "x"], ["--folder", "x", "train.steps=7"]):
        with pytest.raises(SystemExit):
            main(["config", str(config), *arguments])
    assert main(["params", "--length", "64", "transnormerllm-1b", "--json", "model.vocab_size=1000"]) == 0
    assert json.loads(capsys.readouterr().out)["length"] == 64


@pytest.mark.parametrize("arguments", [["trian"], ["train", "c.toml", "--fodler", "x"], ["lm-eval", "run", "a=b"]])
def test_unknown_commands_and_options_are_refused(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert "megalin" in capsys.readouterr().err
