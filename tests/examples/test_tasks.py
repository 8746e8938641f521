"""The configs of generated tasks: each documented mixer fits, and the shards of the documented commands train."""

import re
from pathlib import Path

import pytest

from megalin.__main__ import main
from tools import generate_task

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "tasks"
ROWS = re.findall(r"^\| [\w-]+ \| `(\{type = .*\})` \|$", (ROOT / "docs" / "tasks.md").read_text(), re.MULTILINE)
STEPS = ["train.steps=2", "schedule.warmup_steps=1", "train.evaluate_every_steps=2", "train.evaluate_batches=1"]
SMALL = [*STEPS, "train.global_batch_size=2", "train.micro_batch_size=2"]


@pytest.mark.parametrize("sublayer", ROWS)
def test_documented_mixers_fit_the_configs(sublayer, capsys):
    assert main(["config", str(EXAMPLES / "mqar.toml"), f"model.layers.0.sublayers=[{sublayer}]"]) == 0
    assert f'type = "{re.search(r"[a-z]+[0-9]?", sublayer[9:])[0]}"' in capsys.readouterr().out


def test_every_mixer_of_the_page_is_read():
    assert len(ROWS) == 6


def test_configs_train_on_the_shards_of_the_documented_commands(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for split in ("train", "test"):
        arguments = ["--split", split, "--examples", "20"]
        assert generate_task.main(["mqar", "--setting", "2026", *arguments, "--output", f"mqar-data/{split}"]) == 0
        assert generate_task.main(["s5", *arguments, "--output", f"state-data/{split}-s5"]) == 0
    for name in ("mqar", "state_tracking"):
        assert main(["train", str(EXAMPLES / f"{name}.toml"), "--folder", f"runs/{name}", *SMALL]) == 0
        assert "validation: loss" in capsys.readouterr().out
