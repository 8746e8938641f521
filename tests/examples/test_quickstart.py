"""The quickstart, scaled down: its script, corpus and report."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart"
SMALL = [
    "model.vocab_size=512",
    "model.hidden_size=64",
    "model.layers.0.sublayers.1.intermediate_size=128",
    "model.layers.1.sublayers.1.intermediate_size=128",
    "model.layers.1.repeat=1",
    "data.sequence_length=64",
    "train.steps=40",
    "train.evaluate_every_steps=20",
    "train.evaluate_batches=1",
    "optimizer.lr=1e-2",
    "schedule.warmup_steps=5",
    "schedule.decay_steps=10",
]


def run_python(script: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(QUICKSTART / script), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_script_goes_from_text_to_an_evaluated_model_and_fails_if_it_learned_too_little(tmp_path):
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "CORPUS_SHARE": "0.05",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
    }
    command = ["bash", str(QUICKSTART / "run.sh"), *SMALL]
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    # Such a short run learns something, but less than a nat.
    failures = [line for line in result.stderr.splitlines() if line.startswith("FAILED")]
    assert (result.returncode, len(failures)) == (1, 1), result.stdout + result.stderr
    assert "below the unigram entropy, not 1.0" in failures[0]
    run = tmp_path / "runs" / "quickstart"
    names = {"checkpoints", "config.toml", "evaluation.json", "loss.png", "metrics.jsonl", "tensorboard"}
    assert names <= {path.name for path in run.iterdir()}
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, 41))
    assert {path.name for path in (run / "checkpoints").glob("step-*")} == {"step-00000020", "step-00000040"}
    evaluation = json.loads((run / "evaluation.json").read_text())
    assert evaluation["loss"] < evaluation["unigram_entropy"]
    assert "resuming from the checkpoint" in result.stdout
    assert "PSF License Agreement" in (tmp_path / "quickstart-data" / "LICENSE.txt").read_text()


def test_corpus_is_the_same_each_time_and_its_splits_share_no_text(tmp_path):
    for name in ("once", "again"):
        assert run_python("collect.py", tmp_path / name, "--share", "0.2").returncode == 0
    texts = {}
    for split in ("train", "held-out"):
        lines = (tmp_path / "once" / f"{split}.jsonl").read_text().splitlines()
        assert lines == (tmp_path / "again" / f"{split}.jsonl").read_text().splitlines()
        texts[split] = [json.loads(line)["text"] for line in lines]
    assert len(texts["held-out"]) == round(0.02 * sum(map(len, texts.values())))
    everything = texts["train"] + texts["held-out"]
    assert len(set(everything)) == len(everything)


def test_corpus_holds_sources_topics_and_docstrings(tmp_path):
    assert run_python("collect.py", tmp_path).returncode == 0
    lines = [line for split in ("train", "held-out") for line in (tmp_path / f"{split}.jsonl").open()]
    sources = {json.loads(line)["source"] for line in lines}
    assert {"ast.py", "json/decoder.py", "help topic assert", "docstrings of builtins"} <= sources
    assert not [source for source in sources if "site-packages" in source or source == "pydoc_data/topics.py"]


def report(folder: Path, *, loss: float, steps: list[int]) -> subprocess.CompletedProcess[str]:
    for name in ("checkpoints", "tensorboard"):
        (folder / name).mkdir()
    for name in ("config.toml", "loss.png"):
        (folder / name).touch()
    evaluation = {"loss": loss, "unigram_entropy": 5.0, "tokens": 10, "perplexity": 2.0, "bits_per_byte": 1.0}
    (folder / "evaluation.json").write_text(json.dumps(evaluation))
    (folder / "metrics.jsonl").write_text("".join(json.dumps({"step": step, "loss": 3.0}) + "\n" for step in steps))
    return run_python("report.py", folder)


def test_report_passes_a_margin_of_one_nat(tmp_path):
    result = report(tmp_path, loss=4.0, steps=[1, 2, 3])
    assert result.returncode == 0, result.stderr
    assert "unigram entropy    5.000" in result.stdout


@pytest.mark.parametrize("loss", [4.001, float("nan")])
def test_report_fails_below_one_nat(tmp_path, loss):
    result = report(tmp_path, loss=loss, steps=[1, 2, 3])
    assert result.returncode == 1
    assert "below the unigram entropy" in result.stderr


@pytest.mark.parametrize("steps", [[1, 2, 4], [1, 2, 2, 3]])
def test_report_fails_on_a_gap_or_a_repeated_step(tmp_path, steps):
    result = report(tmp_path, loss=3.0, steps=steps)
    assert result.returncode == 1
    assert "each step once" in result.stderr
