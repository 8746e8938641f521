"""The plan of a ladder: shapes, steps, rules, budgets, and the refusals before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from megalin.__main__ import main
from megalin.errors import ConfigError
from megalin.ladder.config import parse_ladder
from megalin.ladder.plan import Rung, make_rungs, rounded, run_config, within
from megalin.model.build import make_model
from megalin.model.config import ModelConfig
from tests.ladder.ladders import write_ladder

SEARCH = {"factors": [0.5, 2.0], "tokens": 2.0}


def rungs(folder: Path, **fields) -> list[Rung]:
    return make_rungs(parse_ladder(write_ladder(folder, **fields)))


def test_rungs_have_matched_sizes_and_the_rules_of_batch_and_rate(tmp_path):
    """Counts are the built models'; a branch leaves its trunk where its own decay begins."""
    ladder = parse_ladder(write_ladder(tmp_path, tokens=[2.0, 4.0, 8.0]))
    made = make_rungs(ladder)
    assert [rung.name for rung in made] == ["TNL-20k", "TNL-60k", "LLaMA-20k", "LLaMA-60k"]
    for rung, target in zip(made, [20e3, 60e3] * 2, strict=True):
        parameters = rung.shape.counts.non_embedding_parameters
        built = make_model(rung.shape.model)
        assert built.num_parameters() - built.num_embedding_parameters() == parameters
        assert abs(parameters / target - 1) < 0.15
        assert rung.difference == pytest.approx(parameters / target - 1)
        assert rung.tokens_per_step == rounded(1024 * (parameters / 20e3) ** 0.667 / 64) * 64
        assert rung.learning_rate == pytest.approx(0.01 * (parameters / 20e3) ** -0.333)
        trunk, *branches = rung.runs
        assert [run.name for run in rung.runs] == ["8x", "4x", "2x"]
        for run, ratio in zip(rung.runs, (8, 4, 2), strict=True):
            assert run.steps == round(ratio * parameters / rung.tokens_per_step)
            assert run.decay_steps == round(0.2 * run.steps)
        assert [run.first_step for run in branches] == [run.steps - run.decay_steps for run in branches]
        trained = trunk.steps + sum(run.decay_steps for run in branches)
        assert rung.flops == trained * rung.tokens_per_step * built.training_flops(64)
    trunk = run_config(ladder, made[0], made[0].runs[0], Path("f"), factor=2.0)
    branch = run_config(ladder, made[0], made[0].runs[1], Path("f"), factor=2.0)
    assert trunk.checkpoint.keep_steps == sorted(run.first_step for run in made[0].runs[1:])
    assert branch.train.branch_from == f"f/TNL-20k/8x@{made[0].runs[1].first_step}"
    assert trunk.optimizer.lr == branch.optimizer.lr == 2 * made[0].learning_rate
    assert (trunk.schedule.type, branch.schedule.decay_steps) == ("wsd", made[0].runs[1].decay_steps)
    assert trunk.train.global_batch_size % trunk.train.micro_batch_size == 0


def test_flops_of_the_first_mixer_match_the_others(tmp_path):
    made = rungs(tmp_path, match="flops", shape={"aspect": 16.0, "width_multiple": 16, "tolerance": 0.3})
    flops = [rung.shape.counts.flops_per_token for rung in made]
    assert made[3].difference == pytest.approx(flops[3] / flops[1] - 1)
    assert max(abs(rung.difference) for rung in made) < 0.3
    other = rungs(tmp_path, shape={"aspect": 16.0, "width_multiple": 16, "tolerance": 0.3})
    assert other[3].difference == pytest.approx(other[3].shape.counts.non_embedding_parameters / 60e3 - 1)


def test_widths_scale_heads_and_embeddings(tmp_path):
    """Heads keep their width, and an embedding scale of the square root of the width stays one."""
    made = rungs(tmp_path, base={"model": {"embedding_scale": 32**0.5}}, sizes=[200e3], tolerance=None)
    model = made[0].shape.model
    assert isinstance(model, ModelConfig)
    assert model.embedding_scale == pytest.approx(model.hidden_size**0.5)
    assert model.layers[0].sublayers[0].num_heads == model.hidden_size // 16
    assert abs(made[0].shape.aspect / 16 - 1) < 1


@pytest.mark.parametrize(("samples", "expected"), [(0.3, 1), (6.6, 7), (14.1, 14), (127.0, 128), (117.0, 112)])
def test_samples_are_rounded_to_numbers_with_divisors(samples, expected):
    assert rounded(samples) == expected


def test_budget_keeps_whole_sizes_from_the_smallest(tmp_path):
    """The trials of a rate belong to the smallest size."""
    made = rungs(tmp_path, rate_search=SEARCH)
    names = [rung.name for rung in made]
    assert names == ["search/TNL", "TNL-20k", "TNL-60k", "search/LLaMA", "LLaMA-20k", "LLaMA-60k"]
    costs = [1.0, 2.0, 10.0, 1.0, 2.0, 10.0]
    selection = within(made, costs, 25.9, unit="FLOPs")
    assert [rung.name for rung in selection.left_out] == ["TNL-60k", "LLaMA-60k"]
    assert not within(made, costs, 26.0, unit="FLOPs").left_out
    with pytest.raises(ConfigError, match=r"a budget of 5.9 FLOPs is below the smallest size's 6 \(search/TNL, TNL-20"):
        within(made, costs, 5.9, unit="FLOPs")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"sizes": [60e3, 20e3]}, r"sizes = \[60000.0, 20000.0\]: give positive numbers that rise"),
        ({"tokens": []}, "tokens = .*: list should have at least 1 item"),
        ({"warmup": 1.6}, r"warmup = 1.6 tokens a parameter reach into the decay of tokens = 2, which starts at 1.6"),
        ({"mixers": {"a/b": []}}, "mixers: 'a/b' is part of a folder's name; use letters"),
        ({"sizes": [1e3]}, r"TNL-1k: no shape has 1,000 parameters .* the nearest, width 16 with 1 blocks, has"),
        (
            {"sizes": [40e3], "shape": {"aspect": 16.0, "width_multiple": 16, "tolerance": 0.001}},
            r"40,000 parameters without embeddings to 0.1%; the nearest, width 64 with 1 blocks, has 43,008; change",
        ),
        ({"shape": {"width_multiple": 7}}, "no width that is a multiple of shape.width_multiple = 7 gives the heads"),
        ({"batch": {"value": 1e5, "exponent": 0.0}}, r"TNL-20k: 4 tokens a parameter are 1 steps .* lower batch.value"),
        ({"tokens": [3.2, 3.9, 4.0]}, None),
        ({"tokens": [3.99, 4.0]}, "TNL-20k: its run 3.99x of .* steps leaves its trunk after"),
        ({"overrides": ['schedule.type="cosine"']}, 'schedule.type = "cosine" in the config of TNL, but branches need'),
        ({"overrides": ["optimizer.lr=0.1"]}, "optimizer.lr = 0.1 in the config of TNL, but a ladder sets it"),
        ({"overrides": ["train.evaluate_batches=1"]}, "train.evaluate_batches = 1 in the config of TNL, but a ladder"),
        ({"overrides": ["data.validation=[]"]}, "no held-out split in the config of TNL, whose loss a ladder compares"),
        (
            {"overrides": ['data.order="megatron"']},
            'data.order = "megatron" in the config of TNL, whose samples depend',
        ),
        ({"overrides": ["data.x=1"]}, "data.x: unknown key"),
        ({"overrides": ['model={preset="bert-base"}']}, 'model.kind = "encoder" in the config of TNL'),
        ({"rate_search": {"factors": [2.0, 1.0]}}, r"rate_search.factors = \[2.0, 1.0\]: give positive numbers"),
    ],
)
def test_bad_ladder_is_refused_before_any_run(tmp_path, fields, message):
    if message is None:
        assert len(rungs(tmp_path, **fields)[0].runs) == 3
        return
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        rungs(tmp_path, **fields)


def test_command_prints_the_plan_and_refuses_what_does_not_fit(tmp_path, capsys):
    path = write_ladder(tmp_path, mixers={"TNL": []})
    where = [str(path), "--folder", str(tmp_path / "runs")]
    assert main(["ladder", *where, "--dry-run", "--gpu-hours", "0.02"]) == 0
    printed = capsys.readouterr().out
    assert "left out by the budget: TNL-60k" in printed
    assert "the longest run reads" in printed
    assert "TNL-20k" in printed
    assert not (tmp_path / "runs").exists()
    for arguments, message in (
        (["--budget", "1e3"], "a budget of 1e+03 FLOPs is below the smallest size's"),
        (["--budget", "-1"], "--budget -1.0: give a positive number"),
        (["--rung", "3"], "--rung 3: the ladder has rungs 1 to 2; --dry-run lists them"),
        (["--mixer", "X"], "--mixer X: not in the ladder; use some of TNL"),
        (["--processes", "0"], "--processes 0: use at least 1"),
    ):
        assert main(["ladder", *where, *arguments]) == 2
        assert message in capsys.readouterr().err
    (tmp_path / "data" / "train.bin").unlink()
    assert main(["ladder", *where, "--dry-run", "--rung", "1"]) == 0
    assert f"data: {tmp_path}" in capsys.readouterr().out
    assert main(["ladder", *where]) == 3
    assert not (tmp_path / "runs").exists()
