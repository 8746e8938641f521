"""Facts of a run in its report, held-out losses by the size of their evaluation, and the axis of tokens."""

from __future__ import annotations

import json
import re

import pytest

from megalin.report.facts import run_facts
from megalin.report.page import held_out_points, page
from megalin.report.reading import read_run
from megalin.train.curves import Curve, draw, held_out_curves, step_tokens
from tests.report.test_page import Page, write_run

ENVIRONMENT = {
    "command": "megalin train mine.toml 'train.steps=3'",
    "working_directory": "/home/ada",
    "commit": "0123abcd-dirty",
    "device": "NVIDIA H100",
    "ranks": 4,
    "mesh": {"tp": 2, "cp": 1, "pp": 1, "dp": 2, "zero": 2},
}


def test_model_devices_mesh_command_and_commit_are_shown(tmp_path):
    run = write_run(tmp_path / "run")
    sublayer = '{type = "tnl", num_heads = 2, chunk_size = 16}'
    model = f"vocab_size = 40\nhidden_size = 8\nlayers = [{{repeat = 2, sublayers = [{sublayer}]}}]\n"
    (run / "config.toml").write_text(f'[model]\n{model}[train]\nsteps = 3\ndtype = "bfloat16"\ncompile = true\n')
    older = page(read_run(run))
    (run / "environment.json").write_text(json.dumps(ENVIRONMENT | {"host": "node-7"}))
    facts = run_facts(read_run(run))
    assert re.fullmatch(r"tnl; [\d,]+ parameters, 2 blocks, width 8, vocabulary 40", facts.pop("model"))
    assert facts == {
        "device": "4 x NVIDIA H100, bfloat16, compiled blocks",
        "mesh": "tp 2, cp 1, pp 1, dp 2, zero 2",
        "command": "megalin train mine.toml 'train.steps=3' (in /home/ada)",
        "commit": "0123abcd-dirty",
    }
    text = Page(page(read_run(run))).text
    assert all(text.count(fact) == 1 for fact in facts.values())
    assert "hostnode-7" in text
    text = Page(older).text
    assert "Modeltnl;" in text
    assert not {"Command", "Commit", "Mesh"} & set(re.findall("[A-Z][a-z]+", text))


def test_held_out_points_of_other_sizes_are_not_joined(tmp_path):
    sizes = {10: 16384, 20: 16384, 30: 163840}
    lines = [{"step": step, "loss": 3.0, "evaluation_loss": 2.0, "evaluation_tokens": sizes[step]} for step in sizes]
    curves = held_out_curves(held_out_points(read_run(write_run(tmp_path / "run", lines=lines))), "held out")
    assert [(curve.label, list(curve.points)) for curve in curves] == [
        ("held out, 16,384 tokens", [(10, 2.0), (20, 2.0)]),
        ("held out, 163,840 tokens", [(30, 2.0)]),
    ]
    assert [curve.label for curve in held_out_curves([(1, 2.0, ""), (2, 1.0, "")], "held out")] == ["held out"]


def test_tokens_have_an_axis_above_the_steps():
    assert step_tokens([(1, 4096.0), (2, 8192.0)]) == 4096
    assert step_tokens([(1, 4096.0), (2, 8193.0)]) is step_tokens([]) is None
    axes = draw("loss", [Curve("training", [(1, 2.0), (2, 1.0)])], tokens_per_step=4096).axes[0]
    axes.figure.draw_without_rendering()
    low, high = axes.get_xlim()
    assert axes.child_axes[0].get_xlim() == pytest.approx((low * 4096, high * 4096))
