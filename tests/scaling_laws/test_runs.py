"""Losses of run folders: their counts, branches, and the refusal of runs that do not belong together."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tomli_w

from megalin.__main__ import main
from megalin.errors import ConfigError, DataError
from megalin.model.build import make_model
from megalin.model.config import parse_model
from megalin.model.presets import load_preset
from megalin.scaling_laws.paper_counts import paper_counts
from megalin.scaling_laws.runs import mixer_name, read_runs
from tests.report.test_page import Page, assert_harmless
from tests.scaling_laws.designs import CHINCHILLA

LENGTH, BATCH = 32, 4
WSD = {"type": "wsd", "decay_steps": 20}


def model(width: int, mixer: str = "tnl") -> dict:
    sublayers = [{"type": mixer, "num_heads": 2}, {"type": "glu", "intermediate_size": 2 * width}]
    return {"vocab_size": 64, "hidden_size": width, "layers": [{"repeat": 2, "sublayers": sublayers}]}


def counts(width: int, mixer: str = "tnl") -> tuple[int, int]:
    """N, and C / D, by the model itself."""
    built = make_model(parse_model(model(width, mixer), "test"))
    return built.num_parameters() - built.num_embedding_parameters(), built.training_flops(LENGTH)


def write_run(
    folder: Path,
    *,
    width: int = 16,
    steps: int = 100,
    mixer: str = "tnl",
    evaluated: tuple[int, ...] = (100,),
    before: float = 0.0,
    **tables: dict,
) -> Path:
    """Writes a run folder whose held-out losses at the steps `evaluated` are those of a surface."""
    folder.mkdir(parents=True)
    values = {
        "model": model(width, mixer),
        "data": {"train": ["a"], "validation": ["b"], "sequence_length": LENGTH, "tokenizer": "bytes"},
        "train": {"steps": steps, "global_batch_size": BATCH, "micro_batch_size": BATCH},
        "optimizer": {"lr": 1e-3},
        "schedule": WSD,
    }
    for name, table in tables.items():
        values[name] = {**values[name], **table} if name != "schedule" else table
    (folder / "config.toml").write_text(tomli_w.dumps(values))
    parameters, flops = counts(width, mixer)
    lines = []
    for step in range(1, steps + 1):
        tokens = step * BATCH * LENGTH
        line = {"step": step, "loss": 5.0, "tokens": tokens, "flops": tokens * flops}
        if step in evaluated:
            line["evaluation_loss"] = float(CHINCHILLA.loss(parameters, before + tokens))
        lines.append(line)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def edit_metrics(run: Path, line: int, values: dict[str, object]) -> None:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    lines[line - 1] |= values
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_run_gives_its_last_loss_with_the_models_counts(tmp_path):
    run = write_run(tmp_path / "run", evaluated=(50, 100))
    (found,) = read_runs([run])
    (point,) = found.points
    parameters, flops = counts(16)
    tokens = 100 * BATCH * LENGTH
    state = 2 * 2 * 8 * 8 * 4  # blocks, heads, K, V, bytes
    assert point[:6] == (parameters, tokens, float(CHINCHILLA.loss(parameters, tokens)), tokens * flops, "tnl", state)


def test_constant_rate_gives_every_loss_after_its_warmup(tmp_path):
    schedule = {"type": "constant", "warmup_steps": 30}
    run = write_run(tmp_path / "run", evaluated=(20, 50, 100), schedule=schedule, mixer="softmax")
    (found,) = read_runs([run])
    assert [point.tokens / BATCH / LENGTH for point in found.points] == [50, 100]
    assert len({point.run for point in found.points}) == 1
    assert {point.state_bytes for point in found.points} == {None}  # a cache that grows


def test_branches_count_the_tokens_of_their_trunk(tmp_path):
    """A branch of a branch has the tokens and FLOPs of both before it, and the run of the first trunk."""
    write_run(tmp_path / "trunk")
    for name, source, step in (("branch", "trunk", 60), ("twig", "branch", 40)):
        run = write_run(tmp_path / name, steps=50, evaluated=(50,))
        checkpoint = tmp_path / source / "checkpoints" / f"step-{step:08d}"
        (run / "initial_weights.json").write_text(json.dumps({"checkpoint": str(checkpoint), "step": step}))
    runs = read_runs([tmp_path], force=True)
    by_name = {run.path.name: run.points[0] for run in runs}
    steps = {name: point.tokens / BATCH / LENGTH for name, point in by_name.items()}
    assert steps == {"trunk": 100, "branch": 110, "twig": 150}
    assert len({point.run for point in by_name.values()}) == 1
    assert {round(point.flops / point.tokens) for point in by_name.values()} == {counts(16)[1]}
    (tmp_path / "trunk" / "metrics.jsonl").unlink()
    with pytest.raises(DataError, match="trunk holds no run, so that its tokens are unknown; keep the run"):
        read_runs([tmp_path / "branch"])
    (tmp_path / "branch" / "initial_weights.json").write_text("{}")
    with pytest.raises(DataError, match="names no checkpoint and step"):
        read_runs([tmp_path / "branch"])


def test_branches_with_the_trunks_optimizer_count_its_steps_themselves(tmp_path):
    """A run with train.branch_from goes on counting, and shares the run of its trunk, also where both were copied."""
    trunk = write_run(tmp_path / "trunk")
    for name in (str(trunk), "/elsewhere/trunk"):
        run = write_run(tmp_path / f"branch{len(name)}", train={"branch_from": f"{name}@30"})
        lines = (run / "metrics.jsonl").read_text().splitlines()
        (run / "metrics.jsonl").write_text("".join(line + "\n" for line in lines[30:]))
    points = [point for run in read_runs([tmp_path], force=True) for point in run.points]
    assert len({point.run for point in points}) == 1
    assert [point.tokens / BATCH / LENGTH for point in points] == [100, 100, 100]


def test_branch_of_a_step_that_its_trunk_lacks(tmp_path):
    write_run(tmp_path / "trunk")
    run = write_run(tmp_path / "branch")
    checkpoint = tmp_path / "trunk" / "checkpoints" / "step-00000101"
    (run / "initial_weights.json").write_text(json.dumps({"checkpoint": str(checkpoint), "step": 101}))
    with pytest.raises(DataError, match="has no step 101"):
        read_runs([run])


@pytest.mark.parametrize(
    ("tables", "expected"),
    [
        ({"data": {"tokenizer": "other.json"}}, "data.tokenizer: bytes in first; other.json in second"),
        ({"data": {"train": ["c"]}}, r'data.train: \["a"\] in first; \["c"\] in second'),
        ({"data": {"packing": "best_fit"}}, "data.packing"),
        ({"schedule": {"type": "cosine"}}, "schedule.type: wsd in first; cosine in second"),
        ({"schedule": {"type": "wsd", "decay_steps": 50}}, "20 % of the steps in first; 50 % of the steps in second"),
    ],
)
def test_runs_that_do_not_belong_together_are_named(tables, expected, tmp_path):
    runs = [write_run(tmp_path / "first"), write_run(tmp_path / "second", **tables)]
    with pytest.raises(ConfigError, match=rf"(?s)do not belong together.*{expected}.*--force"):
        read_runs(runs)
    assert len(read_runs(runs, force=True)) == 2


@pytest.mark.parametrize(
    ("line", "values", "expected"),
    [
        (100, {"evaluation_loss": None, "evaluation_loss_nonfinite": "nan"}, "step 100: evaluation_loss = nan is not"),
        (10, {"step": 9}, "step 9: follows step 9, but steps must rise"),
        (10, {"tokens": 100}, "step 10: tokens = 100 must be above 1,152"),
        (10, {"tokens": None}, "step 10: tokens = None must be above"),
    ],
)
def test_broken_metrics_are_refused(line, values, expected, tmp_path):
    run = write_run(tmp_path / "run")
    edit_metrics(run, line, values)
    with pytest.raises(DataError, match=expected):
        read_runs([run])


@pytest.mark.parametrize(
    ("evaluated", "schedule", "expected"),
    [
        ((), WSD, "no held-out loss in metrics.jsonl; give its config data.validation"),
        ((80,), WSD, r'no held-out loss after its last step \(100\).*"wsd"'),
        ((20,), {"type": "constant", "warmup_steps": 30}, "no held-out loss after its last step"),
    ],
)
def test_run_without_held_out_loss_is_refused(evaluated, schedule, expected, tmp_path):
    run = write_run(tmp_path / "run", evaluated=evaluated, schedule=schedule)
    with pytest.raises(DataError, match=expected):
        read_runs([run])


def test_folder_without_runs_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="no run in this folder"):
        read_runs([tmp_path])


def test_hybrid_is_named_by_its_mixers():
    assert mixer_name(load_preset("tnl-70m").model) == "tnl"
    assert mixer_name(load_preset("rodimus_plus-1.6b").model) == "rodimus+shared_key_attention"


TABLE_7 = {
    "llama": ("1.6", "5.6", "18.0", "40.4", "99.6", "202.7"),
    "tnl": ("0.5", "2.2", "7.9", "22.3", "66.6", "154.4"),
    "hgrn2": ("0.5", "2.1", "8.0", "22.0", "66.0", "153.6"),
    "cosformer2": ("0.5", "2.3", "8.1", "22.7", "67.4", "155.6"),
}
"""PFLOPs a step of 480 x 8192 tokens, for 70M to 7B."""


@pytest.mark.parametrize("family", TABLE_7)
def test_paper_counts_are_those_of_its_table_7(family):
    names = [f"{family}-{size}" for size in ("70m", "160m", "410m", "1b", "3b", "7b")]
    found = [paper_counts(load_preset(name).model, 8192) for name in names]
    printed = tuple(f"{each.flops_per_token * 480 * 8192 / 1e15:.1f}" for each in found)
    assert printed == TABLE_7[family]
    assert found[3].parameters == pytest.approx({"llama": 906.2e6, "tnl": 918.6e6}.get(family, 912e6), rel=0.01)


def test_paper_has_no_formula_for_other_mixers():
    with pytest.raises(ConfigError, match=r"--counts paper: the model has mamba2.*use --counts model"):
        paper_counts(load_preset("mamba2-1b").model, 8192)


def test_command_fits_a_folder_of_runs(tmp_path, capsys):
    """Runs of known losses give their surface, by a folder that holds them, with a page of the figures."""
    for number, width in enumerate((16, 32, 64, 128)):
        for steps in (20, 40, 80):
            name = f"w{width}-{steps}"
            decay = {"type": "wsd", "decay_steps": steps // 5}
            write_run(tmp_path / str(number % 2) / name, width=width, steps=steps, evaluated=(steps,), schedule=decay)
    page = tmp_path / "page.html"
    assert main(["fit", str(tmp_path), "--resamples", "20", "--json", "--html", str(page)]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["alpha"] == pytest.approx(CHINCHILLA.alpha, rel=1e-3)
    assert values["E"] == pytest.approx(CHINCHILLA.E, abs=0.05)
    parsed = Page(page.read_bytes())
    assert_harmless(parsed)
    assert len(parsed.sources()) == 3
    assert "largest size from the others" in parsed.text
