"""The encoder example, scaled down: pretraining and fine-tuning by its script, and refused input."""

import importlib
import json
import os
import shutil
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest

from megalin.errors import DataError

EXAMPLE = Path(__file__).parents[2] / "examples" / "danet_bert"
SMALL = [
    "train.steps=12",
    "train.evaluate_every_steps=6",
    "train.evaluate_batches=1",
    "schedule.warmup_steps=2",
    "schedule.decay_steps=2",
]


def run_python(script: str, *arguments: str | Path, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLE / script), *map(str, arguments)]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_script_goes_from_text_to_a_saved_classifier(tmp_path, monkeypatch):
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "CORPUS_SHARE": "0.08",
        "CLASSIFY_STEPS": "6",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
    }
    shutil.copytree(EXAMPLE.parent, tmp_path / "examples")  # as a wheel has them: without tools/
    command = ["bash", str(tmp_path / "examples" / "danet_bert" / "run.sh"), *SMALL]
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    for text in ("MLM loss", "NSP accuracy", "loss", "accuracy ", "the most frequent label alone gives"):
        assert text in result.stdout
    run = tmp_path / "runs" / "danet"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 13))
    assert lines[-1]["mlm_loss"] < lines[0]["mlm_loss"]
    assert (run / "classifier" / "step-00000006").is_dir()

    bad, other = tmp_path / "bad.jsonl", tmp_path / "other.jsonl"
    bad.write_text('{"text": "a", "label": "x"}\n{"text": 1, "label": "x"}\n')
    other.write_text('{"text": "a", "label": "x"}\n{"text": "b", "label": "y"}\n')
    arguments = ["--output", tmp_path / "out", "--steps", "1"]
    refused = run_python("classify.py", run, "--train", bad, "--test", other, *arguments, folder=tmp_path)
    assert refused.returncode == 3
    assert f'{bad}:2: expected an object with strings "text" and "label"' in refused.stderr
    bad.write_text('{"text": "a", "label": "z"}\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(EXAMPLE)
    classify = importlib.import_module("classify").classify
    with pytest.raises(DataError, match="label 'z' of the test file is not in the training file"):
        classify(Namespace(run=run, train=other, test=bad))
    with pytest.raises(DataError, match="has one label, 'z'; a classifier needs at least two"):
        classify(Namespace(run=run, train=bad, test=other))


SOURCE = """\
def function(first, second, third, fourth):  # this line has code and a comment, so it counts as a comment
    '''A string of several lines that is neither code nor a comment at all.
    It goes on and on and on and on and on and on and on.'''
    # A short one.
    return first + second + third + fourth + first + second
    value_that_would_be_a_second_line_of_code = None or 1
"""


def test_labels_separate_code_from_comments(tmp_path):
    broken = "'" * 3 + "x" * 99
    sources = {"a.py": SOURCE, "no_python.py": broken, "help topic for": SOURCE, "only_code.py": "x = 1\n" * 99}
    documents = "".join(json.dumps({"source": source, "text": text}) + "\n" for source, text in sources.items())
    (tmp_path / "documents.jsonl").write_text(documents)
    result = run_python("labels.py", "documents.jsonl", "labelled.jsonl", folder=tmp_path)
    assert "1 code, 1 comment" in result.stdout, result.stdout + result.stderr
    lines = [json.loads(line) for line in (tmp_path / "labelled.jsonl").read_text().splitlines()]
    assert [line["text"].split()[0] for line in lines] == ["return", "this"]
    assert [line["label"] for line in lines] == ["code", "comment"]
