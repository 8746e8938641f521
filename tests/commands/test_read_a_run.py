"""`megalin eval` and `megalin report` on a trained run."""

from __future__ import annotations

import json
import math

import pytest

from megalin.__main__ import main
from tests.model_runs import metrics


def output(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert main([str(argument) for argument in arguments]) == 0
    return capsys.readouterr().out


def test_eval_is_the_last_evaluation_of_the_training(run, capsys):
    result = json.loads(output(capsys, "eval", run, "--json"))
    line = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert result["loss"] == line["evaluation_loss"]
    assert result["bits_per_byte"] == line["evaluation_bits_per_byte"]
    assert result["tokens"] == line["evaluation_tokens"]
    assert result["perplexity"] == pytest.approx(math.exp(result["loss"]))
    assert result["loss"] < result["unigram_entropy"]


def test_eval_prints_for_people(run, capsys):
    text = output(capsys, "eval", run)
    loss = metrics(run)[-1]["evaluation_loss"]
    assert f"loss            {loss:.4f} nats a token over 595 tokens" in text
    assert "bits per byte   5." in text
    assert "unigram entropy 4." in text


def test_eval_of_another_split(run, capsys, config):
    training = config.parent / "data" / "train"
    copy = config.parent / "data" / "copy"
    for suffix in (".bin", ".idx"):
        copy.with_suffix(suffix).write_bytes(training.with_suffix(suffix).read_bytes())
    assert json.loads(output(capsys, "eval", run, f"data.validation=['{copy}']", "--json"))["tokens"] > 2500


@pytest.mark.parametrize("command", [["eval"], ["generate", "--prompt", "a"]])
def test_folder_without_a_run_is_refused(fails, tmp_path, command):
    assert "config.toml: no such config file" in fails(2, command[0], tmp_path, *command[1:])


@pytest.mark.parametrize("command", [["eval"], ["generate", "--prompt", "a"]])
def test_run_without_a_checkpoint_is_refused(fails, trained, tmp_path, command):
    (tmp_path / "config.toml").write_text((trained / "config.toml").read_text())
    assert "the run has no checkpoint yet; train it first" in fails(4, command[0], tmp_path, *command[1:])


def test_eval_with_another_model_is_refused(fails, run):
    message = fails(4, "eval", run, "model.layers.0.sublayers.0.num_heads=2")
    assert "model.blocks.0.0.num_heads: 4 in the checkpoint, 2 in the config" in message


def test_eval_without_a_validation_split_is_refused(fails, run):
    assert "the run has no validation split (data.validation is empty" in fails(2, "eval", run, "data.validation=[]")


@pytest.mark.parametrize("override", ["parallel.pp=2", "parallel.shard=1", "parallel={tp = 2}"])
def test_eval_on_a_mesh_of_other_axes_is_refused(fails, run, override):
    assert (
        f"override {override!r}: an evaluation reads only parallel.tp and parallel.cp of [parallel] and divides the "
        "samples among the remaining ranks; remove it"
    ) in fails(2, "eval", run, override)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("parallel.cp=3", "parallel.cp = 3 does not divide the data axis of 1 ranks"),
        ("parallel.tp=2", "parallel.tp = 2 does not divide the number of ranks, 1"),
        ("parallel.tp=0", "tp = 0: input should be greater than or equal to 1"),
    ],
)
def test_eval_on_more_ranks_than_were_started_is_refused(fails, run, override, message):
    assert message in fails(2, "eval", run, override)


def test_report_of_a_run_is_one_file(trained, capsys, tmp_path):
    printed = output(capsys, "report", trained, "--output", tmp_path / "r.html")
    assert printed.endswith("r.html: step 12 of 12, finished\n")
    text = (tmp_path / "r.html").read_text()
    assert f"{metrics(trained)[-1]['evaluation_loss']:.4f} nats a token, over" in text
    assert "step-00000012, 3 files" in text
    assert "decay_scan" in text
    assert "on 1 x cpu" in text


def test_report_is_written_to_the_run_folder_by_default(fails, trained, tmp_path):
    (tmp_path / "config.toml").write_text((trained / "config.toml").read_text())
    assert main(["report", str(tmp_path)]) == 0
    assert (tmp_path / "report.html").read_text().startswith("<!DOCTYPE html>")
    assert "no run in this folder" in fails(2, "report", tmp_path / "none")
