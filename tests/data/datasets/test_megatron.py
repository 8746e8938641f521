"""Runs in Megatron-LM's order: the exact tokens of its builder, the cached index, and every refusal."""

import errno
import fcntl
import hashlib
import os
import re
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from megalin.data.config import DataConfig
from megalin.data.datasets.index_cache import cached
from megalin.data.sources import open_training
from megalin.errors import ConfigError, DataError, StorageError
from tests.data.shard_files import write_by_hand

SIZES = (300, 120, 700)


def _sequences(count, seed):
    rng = np.random.default_rng(seed)
    return [rng.integers(2, 1000, rng.integers(0, 60)).tolist() for _ in range(count)]


@pytest.fixture
def prefixes(tmp_path):
    return [str(write_by_hand(tmp_path / f"p{k}", _sequences(size, k))) for k, size in enumerate(SIZES)]


def _open(folder, *, steps, seed=5, **values):
    config = DataConfig(**{"sequence_length": 16, "order": "megatron", **values})
    return open_training(config, 1000, seed=seed, steps=steps, global_batch_size=10, folder=folder)


def _windows(training, count):
    """Ids [count, T + 1] of the first samples of a run."""
    with training.dataset as dataset:
        batch = dataset.batch(training.order.samples(np.arange(count)))
    return np.concatenate([batch.tokens.numpy(), batch.labels.numpy()[:, -1:]], axis=1).astype("<i8")


def _sources(prefixes, weights):
    return [
        {"name": f"s{k}", "paths": [prefix], "weight": weight}
        for k, (prefix, weight) in enumerate(zip(prefixes, weights, strict=True))
    ]


# sha256 of the same windows from BlendedMegatronDatasetBuilder of Megatron-LM d98e8a6 (August 2026).
@pytest.mark.parametrize(
    ("shards", "weights", "split", "steps", "seed", "digest"),
    [
        (1, None, [90.0, 10.0, 0.0], 130, 7, "acdffc049847e790"),
        (3, [3.0, 1.0, 6.0], [80.0, 20.0, 0.0], 60, 1234, "a8db126f0de842c6"),
        (3, None, [90.0, 10.0, 0.0], 50, 5, "49d617b7ca1b710d"),
    ],
)
def test_samples_are_those_of_megatrons_builder(tmp_path, prefixes, shards, weights, split, steps, seed, digest):
    chosen = prefixes[:shards]
    data = {"train": chosen} if weights is None else {"sources": _sources(chosen, weights)}
    training = _open(tmp_path / "run", steps=steps, seed=seed, split=split, isolate_documents=False, **data)
    windows = _windows(training, 10 * steps)
    assert hashlib.sha256(windows.tobytes()).hexdigest()[:16] == digest
    assert sum(use.read for use in training.uses) == 10 * steps


def test_documents_of_a_sample_are_separated_by_the_index(tmp_path):
    prefix = str(write_by_hand(tmp_path / "x", [[5, 6, 7], [], [8, 9], [8, 9]]))
    training = _open(tmp_path / "run", steps=1, train=[prefix], sequence_length=6)
    with training.dataset as dataset:
        batch = dataset.batch(training.order.samples(np.array([0])))
    boundaries = (batch.labels[0, :-1] == -100).nonzero().flatten().tolist()
    assert batch.document_ids[0].diff().nonzero().flatten().tolist() == boundaries
    assert len(boundaries) >= 2


def _files(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*.npy"))


def _index_time(folder):
    return {path: (folder / path).stat().st_mtime_ns for path in _files(folder)}


def test_index_is_built_once_and_mapped(tmp_path, prefixes, monkeypatch):
    run = tmp_path / "run"
    wanted = _windows(_open(run, steps=9, train=prefixes[:1]), 90)
    before = _index_time(run / "cache")
    monkeypatch.setattr("megalin.data.datasets.megatron.megatron_order", None)
    again = _open(run, steps=9, train=prefixes[:1])
    assert np.array_equal(_windows(again, 90), wanted)
    assert _index_time(run / "cache") == before
    assert len(before) == 3


def test_changed_shard_and_changed_run_have_an_index_of_their_own(tmp_path, prefixes):
    run = tmp_path / "run"
    _open(run, steps=9, train=prefixes[:1])
    for values in ({"steps": 8}, {"steps": 9, "seed": 6}, {"steps": 9, "sequence_length": 17}):
        _open(run, train=prefixes[:1], **values)
    _open(run, steps=9, train=prefixes[:1], split=[50.0, 50.0, 0.0])
    assert len(_files(run / "cache")) == 15
    write_by_hand(prefixes[0], _sequences(SIZES[0], 11))  # another shard under the same name
    changed = _windows(_open(run, steps=9, train=prefixes[:1]), 90)
    assert len(_files(run / "cache")) == 18
    assert np.array_equal(changed, _windows(_open(tmp_path / "fresh", steps=9, train=prefixes[:1]), 90))


def test_index_of_a_killed_builder_is_built_again(tmp_path, prefixes, monkeypatch):
    run = tmp_path / "run"
    wanted = _windows(_open(tmp_path / "fresh", steps=9, train=prefixes[:1]), 90)

    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", killed)
        with pytest.raises(KeyboardInterrupt):
            _open(run, steps=9, train=prefixes[:1])
    assert len([path for path in (run / "cache").iterdir() if path.is_dir()]) == 1  # unfinished, under a temporary name
    assert np.array_equal(_windows(_open(run, steps=9, train=prefixes[:1]), 90), wanted)
    assert len([path for path in (run / "cache").iterdir() if path.is_dir()]) == 1


def test_second_that_needs_an_index_waits_for_the_first_that_builds_it(tmp_path, monkeypatch):
    building, waiting, built = threading.Event(), threading.Event(), []
    lock = fcntl.flock

    def build():
        built.append(threading.get_ident())
        building.set()
        assert waiting.wait(timeout=30)
        return {"a": np.arange(5)}

    def watched(file, how):
        if building.is_set():
            waiting.set()
        lock(file, how)

    monkeypatch.setattr("megalin.data.datasets.index_cache.fcntl.flock", watched)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(cached, tmp_path, {"k": 1}, build)
        assert building.wait(timeout=30)
        second = pool.submit(cached, tmp_path, {"k": 1}, build)
        assert first.result()["a"].tolist() == second.result()["a"].tolist() == [0, 1, 2, 3, 4]
    assert len(built) == 1


def test_file_systems_without_locks_keep_the_first_index(tmp_path, monkeypatch):
    def no_locks(*_):
        raise OSError(errno.ENOTSUP, "no locks")

    def build():
        # Without a lock another process can publish in the meantime.
        if not others:
            others.append(cached(tmp_path, {"k": 1}, lambda: {"a": np.arange(3)}))
        return {"a": np.arange(3)}

    others = []
    monkeypatch.setattr("megalin.data.datasets.index_cache.fcntl.flock", no_locks)
    assert cached(tmp_path, {"k": 1}, build)["a"].tolist() == [0, 1, 2]
    assert len([path for path in tmp_path.iterdir() if path.is_dir()]) == 1


def _swapped(data):
    return data[:-8] + data[-4:] + data[-8:-4]


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("shuffle_index.npy", _swapped, r"shuffle_index\.npy has other bytes than when it was built"),
        ("document_index.npy", lambda data: b"", r"document_index\.npy has other bytes"),
        ("sample_index.npy", lambda data: data[:100], r"sample_index\.npy has other bytes"),
        ("sample_index.npy", None, "other files"),
        ("digests.json", None, "No such file"),
        ("digests.json", lambda data: b"[1]", "cannot convert"),
        ("key.json", lambda data: b"{}", "another key"),
        ("key.json", os.mkfifo, "expected a regular file"),
        ("sample_index.npy", os.mkfifo, "expected a regular file"),
    ],
)
def test_damaged_index_is_built_again_and_logged(tmp_path, prefixes, caplog, name, change, reason):
    run = tmp_path / "run"
    wanted = _windows(_open(run, steps=9, train=prefixes[:1]), 90)
    (path,) = (run / "cache").glob(f"*/{name}")
    good = path.read_bytes()
    path.unlink()
    if change is os.mkfifo:
        os.mkfifo(path)
    elif change is not None:
        path.write_bytes(change(good))
    assert np.array_equal(_windows(_open(run, steps=9, train=prefixes[:1]), 90), wanted)
    assert re.search(rf"the cached index is damaged \(.*{reason}.*\); it is built again", caplog.text)
    assert path.read_bytes() == good
    assert len([path for path in (run / "cache").iterdir() if path.is_dir()]) == 1


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("shuffle_index", -1, "row 4294967295 of its samples"),
        ("shuffle_index", 2**20, "row 1048576 of its samples"),
        ("sample_index", 2**30, "place 1073741824 of its documents"),
        ("sample_index", -5, "place -5 of its documents"),
    ],
)
def test_index_that_changes_while_mapped_is_refused(tmp_path, prefixes, name, value, message):
    training = _open(tmp_path / "run", steps=9, train=prefixes[:1])
    (path,) = (tmp_path / "run" / "cache").glob(f"*/{name}.npy")
    array = np.load(path, mmap_mode="r+")
    array[..., :1] = np.array(value).astype(array.dtype)  # of sample_index the first column
    array.flush()
    with pytest.raises(
        DataError, match=f"p0: its cached index refers to {message}, which does not exist; remove the folder"
    ):
        _windows(training, 90)


def test_cache_that_cannot_be_written_is_named(tmp_path, prefixes):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"file/cache: cannot be written"):
        _open(tmp_path / "file", steps=9, train=prefixes[:1])


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        ({"steps": 5000}, DataError, r"p2: 2\d+ samples, but the run reads 50000; .* give each a weight"),
        ({"seed": 2**32}, ConfigError, r'train.seed = 4294967296: data.order = "megatron" needs a seed below'),
        ({"sequence_length": 50000}, DataError, r"p0: data.sequence_length = 50000 needs 50001 tokens"),
    ],
)
def test_runs_that_the_order_does_not_reach_are_refused(tmp_path, prefixes, values, error, message):
    with pytest.raises(error, match=message):
        _open(tmp_path / "run", **{"steps": 3, "train": prefixes, **values})


def test_blend_that_megatron_could_not_fill_is_refused(tmp_path, prefixes, monkeypatch):
    monkeypatch.setattr("megalin.data.datasets.megatron._SURPLUS", -0.2)
    with pytest.raises(DataError, match=r"p\d: the blend needs \d+ samples, but Megatron-LM builds only \d+"):
        _open(tmp_path / "run", steps=400, sources=_sources(prefixes, [1.0, 1.0, 1.0]))


def test_position_past_the_end_is_refused(tmp_path, prefixes):
    training = _open(tmp_path / "run", steps=3, train=prefixes[:1])
    with training.dataset, pytest.raises(DataError, match="position 30 is past the end of an order of 30"):
        training.order.samples(np.array([29, 30]))
