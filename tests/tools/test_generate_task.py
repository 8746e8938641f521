"""The tool that writes generated tasks: its shards hold the tasks' examples, and bad arguments are refused."""

import numpy as np
import pytest

from megalin.data.shards.indexed_dataset import Shard
from megalin.evaluation.tasks.mqar import MQAR
from megalin.evaluation.tasks.registry import sequence_tasks
from megalin.evaluation.tasks.sequence_task import split_seed
from megalin.evaluation.tasks.state_tracking import S5
from tests.data.shard_files import assert_mask_is_sealed
from tools import generate_task


def _documents(prefix):
    """(ids, label mask) of each sequence of a shard."""
    with Shard(prefix) as shard:
        places = [(shard.first_token(k), int(shard.lengths[k])) for k in range(shard.num_sequences)]
        return [(shard.read(*place), shard.read_label_mask(*place)) for place in places]


def _assert_examples(prefix, task, seed, count):
    documents = _documents(prefix)
    assert_mask_is_sealed(prefix)
    assert len(documents) == count
    for number, (tokens, label_mask) in enumerate(documents):
        expected = task.example(seed, number)
        assert np.array_equal(tokens, expected.tokens)
        assert np.array_equal(label_mask, expected.label_mask)


def test_shards_hold_the_examples_of_a_task(tmp_path, capsys):
    prefix = tmp_path / "new" / "s5"
    assert generate_task.main(["s5", "max_length=5", "--examples", "30", "--seed", "4", "--output", str(prefix)]) == 0
    _assert_examples(prefix, S5(max_length=5), 8, 30)
    assert f"{prefix}: 30 examples, " in capsys.readouterr().out
    arguments = ["s5", "--examples", "3", "--split", "test", "--seed", "4", "--output", str(prefix)]
    assert generate_task.main(arguments) == 0
    _assert_examples(prefix, S5(), 9, 3)


def test_a_setting_writes_a_shard_a_set(tmp_path):
    prefix = tmp_path / "mqar"
    arguments = ["mqar", "vocab_size=1024", "--setting", "2026", "--examples", "3", "--output", str(prefix)]
    assert generate_task.main(arguments) == 0
    sizes = [(64, 4), (128, 8), (256, 16), (256, 32), (256, 64)]
    assert sorted(path.name for path in tmp_path.glob("*.idx")) == sorted(f"mqar-{t}-{p}.idx" for t, p in sizes)
    for length, pairs in sizes:
        task = MQAR(sequence_length=length, num_pairs=pairs, vocab_size=1024)
        _assert_examples(tmp_path / f"mqar-{length}-{pairs}", task, 0, 3)


def test_splits_of_different_seeds_are_different():
    assert len({split_seed(seed, split) for seed in range(-2, 3) for split in ("train", "test")}) == 10


def test_without_a_task_all_are_listed(capsys):
    assert generate_task.main([]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown.replace("\n", "") for name in ("mqar", "parity", "s5", "stack", "listops"))
    assert len(sequence_tasks()) == 8


BAD = [
    (["parity", "--examples", "1"], "--output is missing"),
    (["parity", "--output", "new/x"], "--examples is missing"),
    (["parity", "--examples", "0", "--output", "new/x"], "--examples 0: give at least 1"),
    (["party", "--examples", "1", "--output", "new/x"], "no such task; did you mean 'parity'?"),
    (["parity", "length=1", "--examples", "1", "--output", "new/x"], "length: unknown key"),
    (["needle", "--examples", "1", "--output", "new/x"], "task 'needle' is made of text with a tokenizer"),
    (["parity", "--setting", "2026", "--output", "new/x"], "--setting 2026 has no effect on task 'parity'"),
    (["mqar", "--setting", "2024", "--output", "new/x"], "--setting 2024: no such setting; use one of 2023, 2026"),
    (["mqar", "num_pairs=2", "--setting", "2023", "--output", "new/x"], "num_pairs is fixed by --setting 2023"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD)
def test_bad_arguments_are_refused(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert generate_task.main(arguments) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
