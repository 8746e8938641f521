"""The configs of generated tasks: each documented mixer fits, and the shards of the documented commands train."""

import json
import re
from pathlib import Path

import pytest

from megalin.__main__ import main
from megalin.sweep.order import all_cells, read_sweep
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
    assert len(ROWS) == 7


def test_configs_train_on_the_shards_of_the_documented_commands(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for split in ("train", "test"):
        arguments = ["--split", split, "--examples", "20"]
        assert generate_task.main(["mqar", "--setting", "2026", *arguments, "--output", f"mqar-data/{split}"]) == 0
        assert generate_task.main(["s5", *arguments, "--output", f"state-data/{split}-s5"]) == 0
    for name in ("mqar", "state_tracking"):
        assert main(["train", str(EXAMPLES / f"{name}.toml"), "--folder", f"runs/{name}", *SMALL]) == 0
        assert "validation: loss" in capsys.readouterr().out


def write_shards(task: str, *fields: str, examples: int) -> None:
    """Shards of the documented paths in the working folder, of small examples."""
    for split in ("train", "test"):
        arguments = ["--split", split, "--examples", str(examples), "--output", f"lra-data/{task}-{split}"]
        assert generate_task.main([task, *fields, *arguments]) == 0


LISTOPS = (["listops", "min_length=5", "max_length=24"], 24, 64)
PATHFINDER = (["pathfinder", "image_size=16", "contour_length=8", "num_distractors=1"], 256, 128)


@pytest.mark.parametrize(
    ("shards", "length", "width", "model"),
    [
        pytest.param(*LISTOPS, "danet", id="listops danet"),
        pytest.param(*PATHFINDER, "hgrn2", id="pathfinder hgrn2"),
        pytest.param(*LISTOPS, "hgrn2", id="listops hgrn2", marks=pytest.mark.slow),
        pytest.param(*PATHFINDER, "danet", id="pathfinder danet", marks=pytest.mark.slow),
    ],
)
def test_encoders_train_on_the_shards_of_the_documented_commands(
    tmp_path, monkeypatch, capsys, shards, length, width, model
):
    """Blocks, heads and settings of the configs, with shorter sequences and smaller batches."""
    monkeypatch.chdir(tmp_path)
    write_shards(*shards, examples=8)
    config, few = str(EXAMPLES / f"{shards[0]}_{model}.toml"), ["model.layers.0.repeat=1"] * (model == "hgrn2")
    sizes = [f"data.sequence_length={length}", f"model.hidden_size={width}"]
    assert main(["train", config, "--folder", "run", *SMALL, *sizes, *few]) == 0
    assert re.search(r"validation: loss .* accuracy \d", capsys.readouterr().out)


@pytest.mark.slow
def test_short_expressions_of_listops_are_learned(tmp_path, monkeypatch, capsys):
    """The documented command on a CPU. The most frequent class has 13 %, each digit or operator alone little more."""
    monkeypatch.chdir(tmp_path)
    write_shards("listops", "min_length=4", "max_length=12", "max_depth=3", "max_arguments=3", examples=6000)
    overrides = [
        "data.sequence_length=12",
        "model.max_positions=12",
        "model.layers.0.repeat=2",
        "train.dtype='float32'",
    ]
    overrides += ["train.global_batch_size=64", "train.micro_batch_size=64", "train.evaluate_every_steps=100"]
    overrides += ["train.steps=100", "schedule.warmup_steps=10", "optimizer.lr=5e-3"]
    assert main(["train", str(EXAMPLES / "listops_hgrn2.toml"), "--folder", "runs/short", *overrides]) == 0
    capsys.readouterr()
    assert main(["eval", "runs/short", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["majority"] < 0.2
    assert found["accuracy"] > 0.4


@pytest.mark.parametrize("name", ["mqar_sweep", "mqar_cpu_sweep", "state_tracking_sweep"])
def test_sweeps_are_valid(name):
    sweep = read_sweep(EXAMPLES / f"{name}.toml")
    runs = {"mqar_sweep": 48, "mqar_cpu_sweep": 4, "state_tracking_sweep": 80}
    assert len({cell.name for cell in all_cells(sweep)}) == runs[name]


def check_recall(folder: Path) -> None:
    """Checks a finished sweep of MQAR: softmax attention and HGRN2 recall, a fixed decay does not (docs/results)."""
    runs = json.loads((folder / "results.json").read_text())["results"]
    found = {run["values"]["mixer"]: run["best"]["tasks/mqar/64x4/accuracy"] for run in runs}
    fixed_decay = found.pop("TNL")
    assert fixed_decay < min(found.values()) - 0.3, (fixed_decay, found)
    found.pop("cosFormer2", None)
    assert min(found.values()) > 0.9, found


@pytest.mark.slow
def test_llama_recalls_and_a_fixed_decay_does_not(tmp_path, monkeypatch):
    """The documented sweep on a CPU, with two of its four mixers."""
    monkeypatch.chdir(tmp_path)
    shard = ["vocab_size=512", "--examples", "40000", "--output", "mqar-data/short"]
    assert generate_task.main(["mqar", *shard]) == 0
    sweep = (EXAMPLES / "mqar_cpu_sweep.toml").read_text().replace('"mqar.toml"', json.dumps(f"{EXAMPLES}/mqar.toml"))
    sweep, removed = re.subn(r"^(HGRN2|cosFormer2) = \[\n.*?^\]\n", "", sweep, flags=re.MULTILINE | re.DOTALL)
    assert removed == 2
    Path("sweep.toml").write_text(sweep)
    assert main(["sweep", "sweep.toml", "--folder", "mqar", "--processes", "2"]) == 0
    check_recall(Path("mqar"))
