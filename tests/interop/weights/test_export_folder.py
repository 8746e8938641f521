"""Exported folders: model card, file modes, lengths, and the presets that a class can express."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from megalin.config import parse
from megalin.errors import ConfigError
from megalin.interop.weights.exporting import NO_LIMIT, export_hf
from megalin.interop.weights.layouts import layout_of_model
from megalin.model.config import ModelConfig
from megalin.model.presets import expand_preset, preset_names
from tests.interop.weights.models import MODELS, SEQUENCE_LENGTH, write_run

PAGE = Path(__file__).parents[3] / "docs/interchange.md"


@pytest.mark.parametrize(("name", "length"), [("llama", SEQUENCE_LENGTH), ("hgrn2", NO_LIMIT)])
def test_folder_has_a_card_and_the_modes_of_the_umask(name: str, length: int, tmp_path: Path):
    model = write_run(tmp_path / "run", MODELS[name].table)
    lines = [{"step": 2, "loss": 3.5, "evaluation_loss": 4.25}, {"step": 3, "loss": 3.25}, {"step": 4, "loss": 1.0}]
    (tmp_path / "run/metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    segments = [{"step": step, "changes": {"optimizer.lr": [0.01, 0.001]}} for step in (1, 3)]
    (tmp_path / "run/identity.json").write_text(json.dumps({"config": {}, "inputs": {}, "segments": segments}))
    export_hf(tmp_path / "run", tmp_path / "out")
    card = (tmp_path / "out/README.md").read_text()
    assert f"| parameters | {model.num_parameters():,} |" in card
    assert f"| tokens | {3 * SEQUENCE_LENGTH}, in sequences of {SEQUENCE_LENGTH} |" in card
    assert "| training loss, nats a token | 3.2500 (step 3) |" in card
    assert "| held-out loss, nats a token | 4.2500 (step 2) |" in card
    assert "| since step 1 | optimizer.lr 0.01 -> 0.001 |" in card
    assert "since step 3" not in card  # the checkpoint is of that step
    assert "license_name: to-be-chosen" in card
    assert "`shard`" in card
    (tmp_path / "plain").touch()
    modes = {file.stat().st_mode for file in (tmp_path / "out").iterdir()}
    assert modes == {(tmp_path / "plain").stat().st_mode}
    assert json.loads((tmp_path / "out/config.json").read_text())["max_position_embeddings"] == length


def test_card_of_transnormerllm_names_the_files_to_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_run(tmp_path / "run", MODELS["transnormerllm"].table)
    (tmp_path / "out").mkdir()
    (tmp_path / "link").symlink_to("out")
    export_hf(tmp_path / "run", tmp_path / "link")
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    export_hf(tmp_path / "run", Path())
    assert (tmp_path / "empty/config.json").is_file()
    assert "modeling_transnormer.py" in (tmp_path / "out/README.md").read_text()


def _leaves(name: str) -> bool:
    table = expand_preset({"preset": name})
    if table.get("kind") == "encoder":
        return False
    try:
        layout_of_model(parse(ModelConfig, table, name), None)
    except ConfigError:
        return False
    return True


def test_page_counts_the_presets_that_a_class_can_express():
    names = preset_names()
    leaving = [name for name in names if _leaves(name)]
    assert leaving
    (count, total) = re.findall(r"(\d+) of the (\d+) presets", PAGE.read_text(encoding="utf-8"))[0]
    assert (int(count), int(total)) == (len(leaving), len(names)), leaving
