"""Length of an imported run: iterations, samples and tokens, of which the earliest ends it."""

from __future__ import annotations

import pytest

from tests.interop.configs.test_megatron import SMALL, _imported, _notes

# 8 sequences of 32 tokens a step.
ENDS = {
    "--train-iters": (70, 70),
    "--train-samples": (8 * 60 + 7, 60),  # Megatron-LM rounds down
    "--train-tokens": (256 * 50 - 1, 50),  # a step begins as long as tokens are left
}


@pytest.mark.parametrize("given", [list(ENDS), list(ENDS)[1:], list(ENDS)[:2], *([name] for name in ENDS)])
def test_run_ends_at_the_earliest_of_iterations_samples_and_tokens(given: list[str]):
    flags = SMALL.replace("--train-iters 100", " ".join(f"{name} {ENDS[name][0]}" for name in given))
    imported = _imported(flags)
    assert imported.get("train.steps") == min(ENDS[name][1] for name in given)
    assert imported.get("train.stop_after_steps") is None
    later = {name: f"{ENDS[name][1]} steps, but {given[-1]} ends the run" for name in given[:-1]}
    notes = _notes(imported, "no effect")
    assert {name: text.partition(" after")[0] for name, text in notes.items()} == later


def test_schedule_counts_tokens_where_both_are_given():
    flags = SMALL.replace("--train-iters 100", "--train-samples 8000 --train-tokens 25600")
    flags += "--lr-decay-samples 80 --lr-decay-tokens 20480 --lr-warmup-samples 8 --lr-warmup-tokens 5120"
    imported = _imported(flags)
    assert imported.get("schedule.warmup_steps") == 20
    assert "not at 80" in str(_notes(imported, "differs"))


@pytest.mark.parametrize("batch", ["0", "inf"])
@pytest.mark.parametrize("end", ["--train-samples", "--train-tokens"])
def test_steps_need_a_positive_batch(batch: str, end: str):
    flags = SMALL.replace("--train-iters 100", f"{end} 8000") + f"--global-batch-size {batch}"
    assert end in _notes(_imported(flags), "fill in")


def test_tokens_need_the_length_of_a_sequence():
    flags = SMALL.replace("--train-iters 100", "--train-tokens 25600").replace("--seq-length 32", "")
    assert "--seq-length" in _notes(_imported(flags), "fill in")["--train-tokens"]


@pytest.mark.parametrize("name", ["RMSNorm", "rmsnorm", "rmsNorm"])
def test_norms_are_known_in_any_case(name: str):
    imported = _imported(SMALL + f"--normalization {name}")
    assert imported.get("model.norm") == "rmsnorm"
    assert imported.get("model.layers")[0]["sublayers"][0]["norm"] == "rmsnorm"
