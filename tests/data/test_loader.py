"""Loaders: steps as a function of their number, the same samples on every mesh, and validation on every rank."""

import threading
import time
from collections import Counter

import numpy as np
import pytest
import torch

from megalin.data.batch import IGNORED_LABEL, with_draw
from megalin.data.blend import BlendedOrder, BlendSource, Phase
from megalin.data.config import DataConfig
from megalin.data.datasets.token import TokenDataset
from megalin.data.loader import Loader, ValidationLoader
from megalin.data.order import endless
from megalin.data.shards import indexed_dataset
from megalin.errors import ConfigError, DataError, RankStalledError
from tests.data.shard_files import write_by_hand


@pytest.fixture
def dataset(tmp_path):
    rng = np.random.default_rng(0)
    sequences = [rng.integers(0, 99, rng.integers(1, 12)).tolist() for _ in range(40)]
    prefix = write_by_hand(tmp_path / "x", sequences)
    with TokenDataset.open(DataConfig(train=[str(prefix)], sequence_length=5), "train", 100) as opened:
        yield opened


def _loader(dataset, **values):
    order = BlendedOrder([BlendSource("train", dataset.num_samples)], [Phase(0, [1.0])], seed=values.pop("seed", 3))
    return Loader(dataset, order, **{"global_batch_size": 8, "micro_batch_size": 2, **values})


def _same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_step_is_micro_batches_of_the_asked_size(dataset):
    with _loader(dataset) as loader:
        batches = loader.step(0).batches
    assert [tuple(batch.tokens.shape) for batch in batches] == [(2, 5)] * 4


@pytest.mark.parametrize(("dp_size", "micro_batch_size"), [(1, 8), (2, 4), (4, 2), (4, 1), (2, 2), (8, 1)])
def test_every_mesh_reads_the_same_samples_in_each_step(dataset, dp_size, micro_batch_size):
    with _loader(dataset, micro_batch_size=8) as loader:
        wanted = [loader.step(step).batches[0].sample_ids.tolist() for step in range(12)]
    loaders = [
        _loader(dataset, dp_rank=rank, dp_size=dp_size, micro_batch_size=micro_batch_size) for rank in range(dp_size)
    ]
    for step in range(12):
        of_ranks = [loader.step(step).batches for loader in loaders]
        got = [i for micro in zip(*of_ranks, strict=True) for batch in micro for i in batch.sample_ids.tolist()]
        assert got == wanted[step]
    for loader in loaders:
        loader.close()


def test_every_sample_is_read_once_an_epoch(dataset):
    steps = 2 * dataset.num_samples  # an epoch ends with a step
    with _loader(dataset, global_batch_size=4, micro_batch_size=4) as loader:
        ids = [i for step in range(steps) for i in loader.step(step).batches[0].sample_ids.tolist()]
    first = ids[: dataset.num_samples]
    assert sorted(first) == list(range(dataset.num_samples))
    assert first != sorted(first)
    assert set(Counter(ids).values()) == {8}


@pytest.mark.parametrize(("dp_size", "micro_batch_size"), [(1, 8), (2, 2), (4, 1)])
def test_draws_number_the_samples_of_the_run_over_all_ranks_and_epochs(dataset, dp_size, micro_batch_size):
    loaders = [
        _loader(dataset, dp_rank=rank, dp_size=dp_size, micro_batch_size=micro_batch_size) for rank in range(dp_size)
    ]
    for step in (0, 1, 3 * dataset.num_samples):
        of_ranks = [loader.step(step).batches for loader in loaders]
        got = [i for micro in zip(*of_ranks, strict=True) for batch in micro for i in batch.draw.tolist()]
        assert got == list(range(8 * step, 8 * step + 8))
    for loader in loaders:
        loader.close()


def test_resumed_loader_continues_bit_for_bit(dataset):
    with _loader(dataset) as whole:
        wanted = [whole.step(step).batches for step in range(15)]
    with _loader(dataset) as resumed:
        for step in (9, 10, 11, 2, 14):
            assert all(_same(a, b) for a, b in zip(resumed.step(step).batches, wanted[step], strict=True))


def test_seed_changes_the_order(dataset):
    with _loader(dataset) as a, _loader(dataset, seed=4) as b:
        assert a.step(0).batches[0].sample_ids.tolist() != b.step(0).batches[0].sample_ids.tolist()


def test_batch_holds_what_its_sample_ids_name(dataset):
    with _loader(dataset) as loader:
        batch = loader.step(1).batches[2]
    assert _same(batch, with_draw(dataset.batch(batch.sample_ids.numpy()), batch.draw))


def test_next_step_is_read_ahead(dataset, monkeypatch):
    read = threading.Event()
    calls = []
    real = TokenDataset.batch

    def spy(self, samples):
        calls.append(samples)
        if len(calls) == 2:
            read.set()
        return real(self, samples)

    monkeypatch.setattr(TokenDataset, "batch", spy)
    with _loader(dataset, micro_batch_size=8) as loader:
        loader.step(0)
        assert read.wait(timeout=30)
        ahead = loader.step(1).batches
    assert calls[1].tolist() == ahead[0].sample_ids.tolist()


def test_error_of_the_step_read_ahead_reaches_the_caller_when_it_is_asked_for(tmp_path):
    prefix = write_by_hand(tmp_path / "x", [[1] * 41, [99, 1]])
    with TokenDataset.open(DataConfig(train=[str(prefix)], sequence_length=2), "train", 50) as dataset:
        bad = dataset.num_samples - 1
        with _loader(dataset, global_batch_size=1, micro_batch_size=1) as loader:
            order = endless(np.arange(dataset.num_samples), num_samples=dataset.num_samples, seed=3).tolist()
            step = order.index(bad)
            assert [loader.step(k).batches[0].sample_ids.item() for k in range(step)] == order[:step]
            with pytest.raises(DataError, match="token id 99 at offset"):
                loader.step(step)


def test_thread_that_is_stuck_is_named_with_its_file_and_samples(dataset, monkeypatch):
    loader = _loader(dataset, workers=2, timeout_seconds=0.2, shards=dataset.shards)
    release, plain = threading.Event(), indexed_dataset.read_ranges

    def stuck(*args, **options):
        release.wait(20)
        return plain(*args, **options)

    monkeypatch.setattr(indexed_dataset, "read_ranges", stuck)
    monkeypatch.setattr(indexed_dataset, "read_range", stuck)
    started = time.monotonic()
    with pytest.raises(
        RankStalledError, match=r"batch 8 was not read within 0.2 s .* worker 0 reads \S+\.bin for samples \d+, \d+"
    ):
        loader.step(7)
    loader.close()  # does not wait for the thread
    assert time.monotonic() - started < 10
    release.set()


def test_closing_ends_the_thread(dataset):
    before = threading.active_count()
    loader = _loader(dataset)
    loader.step(0)
    loader.close()
    assert threading.active_count() == before


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"global_batch_size": 10, "dp_size": 2},
            "= 10 is not a positive multiple of .* = 2 times dp = 2; use 8 or 12",
        ),
        ({"global_batch_size": 1}, "global_batch_size = 1 is not .*; use 2 or 4"),
        ({"micro_batch_size": 0}, "micro_batch_size = 0 times"),
        ({"global_batch_size": 0}, "global_batch_size = 0 is not a positive multiple"),
    ],
)
def test_batch_that_does_not_divide_is_refused(dataset, values, message):
    with pytest.raises(ConfigError, match=message):
        _loader(dataset, **values)


@pytest.mark.parametrize(("dp_size", "micro_batch_size"), [(1, 4), (2, 3), (3, 2), (4, 16), (8, 7)])
def test_validation_reads_each_sample_once_and_every_rank_as_many_batches(dataset, dp_size, micro_batch_size):
    ids, counts = [], set()
    for rank in range(dp_size):
        loader = ValidationLoader(dataset, micro_batch_size=micro_batch_size, dp_rank=rank, dp_size=dp_size)
        batches = list(loader)
        counts.add(len(batches))
        assert len(loader) == len(batches)
        for batch in batches:
            assert batch.tokens.shape == (micro_batch_size, 5)
            padding = batch.sample_ids == -1
            assert (batch.labels[padding] == IGNORED_LABEL).all()
            ids += batch.sample_ids[~padding].tolist()
    assert len(counts) == 1
    assert sorted(ids) == list(range(dataset.num_samples))


def test_validation_is_bounded_over_all_ranks(dataset):
    loaders = [
        ValidationLoader(dataset, micro_batch_size=2, dp_rank=rank, dp_size=2, max_samples=5) for rank in range(2)
    ]
    ids = [batch.sample_ids.tolist() for loader in loaders for batch in loader]
    assert ids == [[0, 1], [4, -1], [2, 3], [-1, -1]]


@pytest.mark.parametrize(("workers", "read_ahead_steps"), [(1, 1), (3, 1), (4, 5)])
def test_threads_and_read_ahead_change_nothing(dataset, workers, read_ahead_steps):
    with _loader(dataset) as plain, _loader(dataset, workers=workers, read_ahead_steps=read_ahead_steps) as loader:
        for step in (0, 1, 2, 7, 3, 4):
            wanted, found = plain.step(step), loader.step(step)
            assert torch.equal(found.digest, wanted.digest)
            assert all(_same(a, b) for a, b in zip(found.batches, wanted.batches, strict=True))


@pytest.mark.parametrize(("dp_size", "micro_batch_size"), [(1, 1), (2, 4), (4, 2), (8, 1)])
def test_digests_of_the_ranks_add_up_to_that_of_the_step(dataset, dp_size, micro_batch_size):
    with _loader(dataset, micro_batch_size=8) as whole:
        wanted = [whole.step(step).digest for step in range(4)]
    total = [torch.zeros(2, dtype=torch.int64)] * 4
    for rank in range(dp_size):
        with _loader(dataset, dp_rank=rank, dp_size=dp_size, micro_batch_size=micro_batch_size) as loader:
            total = [total[step] + loader.step(step).digest for step in range(4)]
    assert all(torch.equal(a, b) for a, b in zip(total, wanted, strict=True))
    assert len({tuple(digest.tolist()) for digest in wanted}) == 4


def test_digest_depends_on_the_places_of_samples(dataset):
    class Swapped:
        def samples(self, positions):
            return positions ^ 1

    class Plain:
        def samples(self, positions):
            return positions

    with (
        Loader(dataset, Plain(), global_batch_size=4, micro_batch_size=2) as plain,
        Loader(dataset, Swapped(), global_batch_size=4, micro_batch_size=2) as swapped,
    ):
        assert not torch.equal(plain.step(0).digest, swapped.step(0).digest)


def test_preparation_is_done_by_the_readers_after_the_digest(dataset):
    threads = set()

    def prepare(batch):
        threads.add(threading.current_thread())
        return batch._replace(tokens=batch.tokens[:, :2])

    with _loader(dataset, prepare=prepare) as loader, _loader(dataset) as plain:
        prepared, whole = loader.step(0), plain.step(0)
    assert torch.equal(prepared.digest, whole.digest)
    assert prepared.batches[0].tokens.shape == (2, 2)
    assert threading.main_thread() not in threads
