"""Faults of configs, ranks and use: F25 to F39."""

from __future__ import annotations

import json
from functools import partial

from fault_matrix import changes
from fault_matrix.lab import Lab, flip, ledger, seal, step_folder
from fault_matrix.processes import Outcome
from fault_matrix.table import fault


def _refused_on_ranks(lab: Lab, outcomes: list[Outcome], code: int, *patterns: str, seconds: float = 30.0) -> None:
    """Records that every rank is refused alike, before the first step."""
    for outcome in outcomes:
        lab.expect_refusal(outcome, code, *patterns, seconds=seconds)
    lab.check("before step 1", not any("step 1/" in outcome.text for outcome in outcomes))


def _override_on_rank(lab: Lab, *overrides: str) -> list[Outcome]:
    config = lab.config()
    arguments = ["train", str(config), "--folder", str(lab.folder / "run"), *overrides]
    return lab.train_on_ranks(config, arguments_of={1: arguments})


@fault("F25", "a rank has another model")
def _other_model(lab: Lab) -> None:
    outcomes = _override_on_rank(lab, "model.hidden_size=32")
    _refused_on_ranks(lab, outcomes, 2, "rank 1", "hidden_size = 32", "16")


@fault("F26", "a rank has other bytes in a shard")
def _other_shard(lab: Lab) -> None:
    config = lab.config(parallel={"shard": 2})
    other = lab.config("other", shards=[lab.shard("elsewhere/train", seed=2)])
    # Both ranks give the same path; rank 1 finds other bytes there, as on another host.
    change = partial(changes.redirect, str(lab.folder / "data"), str(lab.folder / "data" / "elsewhere"))
    outcomes = lab.train_on_ranks(config, change_of={1: change})
    codes = [outcome.code for outcome in outcomes]
    lab.check("every rank refuses", codes == [3, 3], f"exit {codes}: {outcomes[0].last_line}")
    for outcome in outcomes:
        lab.expect_refusal(outcome, 3, r"rank 1", r"train")
    assert other.exists()


@fault("F27", "a rank has another seed or dtype")
def _other_seed(lab: Lab) -> None:
    _refused_on_ranks(lab, _override_on_rank(lab, "train.seed=2"), 2, "rank 1", "seed = 2")


@fault("F28", "a rank has another torch")
def _other_version(lab: Lab) -> None:
    outcomes = lab.train_on_ranks(lab.config(), change_of={1: partial(changes.pretend_version, "2.9.9")})
    codes = [outcome.code for outcome in outcomes]
    lab.check("every rank refuses", 0 not in codes, f"exit {codes}: {outcomes[0].last_line}")
    _refused_on_ranks(lab, outcomes, 2, "rank 1", r"2\.9\.9")


@fault("F29", "resume at another world size")
def _other_world_size(lab: Lab) -> None:
    _, expected = lab.finished_run("expected")
    config, run = lab.config(), lab.folder / "run"
    lab.expect_success(lab.train(config, "train.stop_after_steps=2"), "one rank")
    for rank in lab.train_on_ranks(config, "train.stop_after_steps=4"):
        lab.expect_success(rank, "two ranks")
    lab.expect_success(lab.train(config), "one rank again")
    lab.check("the same samples", ledger(run) == ledger(expected), f"{len(ledger(run))} lines")


@fault("F30", "the global batch is not divisible")
def _indivisible(lab: Lab) -> None:
    outcomes = lab.train_on_ranks(lab.config(train={"global_batch_size": 5}))
    for outcome in outcomes:
        lab.expect_refusal(outcome, 2, "global_batch_size", "5")


@fault("F31", "the checkpoint is of another model")
def _checkpoint_of_other_model(lab: Lab) -> None:
    config, _ = lab.finished_run()
    outcome = lab.train(config, "model.hidden_size=32", change=changes.refuse_engines)
    lab.expect_refusal(outcome, 4, "hidden_size", "32", "16")
    lab.check("before the engine is built", "the engine was built" not in outcome.text)


@fault("F32", "a tensor is missing or has another shape")
def _missing_tensor(lab: Lab) -> None:
    config, run = lab.finished_run()
    path = step_folder(run, 6) / "index.json"
    index = json.loads(path.read_text())
    del index["tensors"]["embedding.weight"]
    path.write_text(json.dumps(index))
    seal(path.parent)
    lab.expect_refusal(lab.train(config, "train.steps=8", "schedule.allow_jump=true"), 4, r"embedding\.weight")


@fault("F33", "the tokenizer is not the shards'")
def _other_tokenizer(lab: Lab) -> None:
    config = lab.config()
    manifest = lab.folder / "data" / "train.manifest.json"
    manifest.write_text(json.dumps({"tokens": 1500, "tokenizer": {"digest": "0" * 64}}))
    lab.expect_refusal(lab.train(config), 3, "0000", "tokenizer")


@fault("F34", "unknown key, wrong type, out of range")
def _bad_config(lab: Lab) -> None:
    config = lab.config()
    outcome = lab.train(config, "optimizer.lr=-1", "train.stepz=5", "train.micro_batch_size=two")
    lab.expect_refusal(outcome, 2, r"optimizer\.lr", "did you mean 'steps'", "micro_batch_size", seconds=5)


@fault("F35", "stale temporary folders")
def _stale_folders(lab: Lab) -> None:
    config, run = lab.finished_run()
    stale = run / "checkpoints" / ".tmp-step-00000008-ab12"
    stale.mkdir()
    (stale / "data").write_text("x")
    (run / "checkpoints" / "step-00000099.tmp").mkdir()
    outcome = lab.train(config, "train.steps=6", "train.stop_after_steps=6")
    lab.expect_success(outcome, "nothing left to do")
    lab.expect_success(lab.train(lab.config("other"), folder="other"), "another run")
    outcome = lab.train(config, folder="run")
    lab.check("ignored", outcome.code == 0, outcome.last_line)


@fault("F36", "two runs in one folder")
def _two_runs(lab: Lab) -> None:
    config, run = lab.config(), lab.folder / "run"
    first = lab.start("train", config, "--folder", run, change=partial(changes.slow_steps, 0.5))
    first.wait_until(lambda: (run / "ledger.jsonl").exists(), seconds=60)
    lab.expect_refusal(lab.train(config), 2, f"pid {first.pid}", "since", seconds=10)
    first.kill()
    first.wait(seconds=10)
    outcome = lab.train(config)
    lab.expect_success(outcome, "a dead owner is taken over")
    lab.check("takeover logged", "taken over" in outcome.text, outcome.last_line)


@fault("F37", "no pointer file: the newest checkpoint that verifies is taken")
def _no_pointer(lab: Lab) -> None:
    config, run = lab.finished_run()
    (run / "checkpoints" / "latest").write_text("step-99999999")
    flip(step_folder(run, 6) / "manifest.json")
    outcome = lab.train(config)
    lab.expect_success(outcome, "resumed from the step before")
    lab.check("the damaged one is named", "checkpoint skipped" in outcome.text and "step-00000006" in outcome.text)


@fault("F39", "bad variables of a launcher")
def _bad_variables(lab: Lab) -> None:
    config = lab.config()
    ranks = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    lab.expect_refusal(lab.train(config, **ranks, RANK="5"), 2, "RANK = 5", seconds=10)
    lab.expect_refusal(lab.train(config, **ranks, RANK="x"), 2, "RANK = 'x'", seconds=10)
    lab.expect_refusal(lab.train(config, RANK="0"), 2, "WORLD_SIZE", seconds=10)
