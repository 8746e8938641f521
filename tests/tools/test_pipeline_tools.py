"""Tools for the data of runs: comparison of ledgers, benchmark of the loader, fuzzing of shards."""

import json
import subprocess
import sys

import pytest

from tests.data.shard_files import write_by_hand
from tools import benchmark_loader, compare_ledgers, fuzz_shards


def _ledger(path, digests):
    path.write_text("".join(json.dumps({"step": k, "digest": d}) + "\n" for k, d in enumerate(digests, start=1)))
    return str(path)


def test_ledgers_are_compared_with_an_exit_code(tmp_path, capsys):
    first = _ledger(tmp_path / "a", ["x", "y", "z"])
    assert compare_ledgers.main([first, _ledger(tmp_path / "b", ["x", "y"])]) == 0
    assert "2 steps in both, 1 only in the first, 0 only in the second\nthe same samples" in capsys.readouterr().out
    assert compare_ledgers.main([first, _ledger(tmp_path / "c", ["x", "w", "w"])]) == 1
    assert "different samples from step 2 on" in capsys.readouterr().out
    assert compare_ledgers.main([first, str(tmp_path / "none")]) == 3
    assert "none: cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize("options", [[], ["--packing", "best_fit"], ["--order", "megatron"]])
def test_loader_is_measured(tmp_path, capsys, options):
    prefix = write_by_hand(tmp_path / "x", [[k] * 30 for k in range(40)])
    sizes = ["--sequence-length", "16", "--global-batch-size", "8", "--steps", "3", "--dp-size", "2"]
    assert benchmark_loader.main([str(prefix), *sizes, *options]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["tokens_per_second"] > 0
    assert 0 < found["wait_fraction"] <= 1


@pytest.mark.parametrize(("option", "value"), [("--steps", "0"), ("--step-seconds", "-1")])
def test_loader_options_below_the_least_are_refused(capsys, option, value):
    with pytest.raises(SystemExit):
        benchmark_loader.main([option, value])
    assert f"error: {option} {value}" in capsys.readouterr().err


def test_loader_of_a_missing_shard_is_refused(tmp_path, capsys):
    assert benchmark_loader.main([str(tmp_path / "none")]) == 3
    assert "no such file" in capsys.readouterr().err


def test_mutants_of_an_index_are_refused_or_sound(tmp_path):
    command = [sys.executable, fuzz_shards.__file__, "--count", "4000", "--seed", "2", "--folder", str(tmp_path)]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout
    found = json.loads(shown)
    assert found["refused"] + found["accepted"] == 4000
    assert found["refused"] > 3600
    assert found["accepted with other bytes"] > 0
    assert found["of these with the same digest"] == 0


def test_fuzzing_does_not_catch_other_errors(tmp_path, monkeypatch):
    def broken(_):
        raise MemoryError

    monkeypatch.setattr(fuzz_shards, "Shard", broken)
    with pytest.raises(MemoryError):
        fuzz_shards.fuzz(tmp_path, count=1, seed=0)
