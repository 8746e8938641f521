"""Training data of a run: concatenated datasets, sampling fractions, the report, and the identity in a checkpoint."""

import numpy as np
import pytest
import torch

from megalin.data.config import DataConfig
from megalin.data.datasets.token import TokenDataset
from megalin.data.sources import ConcatDataset, open_training
from tests.data.shard_files import write_by_hand


@pytest.fixture
def prefixes(tmp_path):
    rng = np.random.default_rng(0)
    shards = [[rng.integers(0, 99, 12).tolist() for _ in range(count)] for count in (10, 20, 70)]
    return [str(write_by_hand(tmp_path / f"p{k}", shard)) for k, shard in enumerate(shards)]


def _sources(prefixes, weights=(None, None, None)):
    return [
        {"name": f"s{k}", "paths": [prefix]} | ({} if weight is None else {"weight": weight})
        for k, (prefix, weight) in enumerate(zip(prefixes, weights, strict=True))
    ]


def _open(tmp_path, **values):
    config = DataConfig(**{"sequence_length": 5, **values})
    return open_training(config, 100, seed=3, steps=20, global_batch_size=10, folder=tmp_path)


def test_concatenated_datasets_keep_the_order_of_the_requested_samples(prefixes):
    config = DataConfig(train=prefixes, sequence_length=5)
    datasets = [TokenDataset.open(config, "train", 100, [prefix]) for prefix in prefixes]
    concatenated = ConcatDataset(datasets)
    firsts = np.cumsum([0, *(dataset.num_samples for dataset in datasets)])
    assert concatenated.num_samples == firsts[-1]
    requested = np.array([firsts[1], 0, firsts[3] - 1, firsts[1] - 1, firsts[2], 1])
    batch = concatenated.batch(requested)
    assert batch.sample_ids.tolist() == requested.tolist()
    for row, sample in enumerate(requested):
        owner = int(np.searchsorted(firsts, sample, side="right")) - 1
        alone = datasets[owner].batch(np.array([sample - firsts[owner]]))
        assert torch.equal(batch.tokens[row], alone.tokens[0])
        assert torch.equal(batch.labels[row], alone.labels[0])
    concatenated.close()


def test_sources_without_weights_are_sampled_in_proportion_to_their_size(tmp_path, prefixes):
    training = _open(tmp_path, sources=_sources(prefixes))
    samples = [use.samples for use in training.uses]
    assert samples == [23, 47, 167]
    assert [use.read for use in training.uses] == pytest.approx([200 * n / sum(samples) for n in samples], abs=1)
    assert all(use.epochs == pytest.approx(200 / sum(samples), abs=0.05) for use in training.uses)


def test_report_lists_tokens_samples_fractions_and_epochs(tmp_path, prefixes):
    phases = [{"from_step": 10, "weights": {"s0": 1.0}}]
    training = _open(tmp_path, sources=_sources(prefixes, (0.5, 0.5, 0.0)), phases=phases)
    rows = [line.split() for line in training.report_lines()]
    assert rows[0] == ["source", "tokens", "samples", "read", "fraction", "epochs", "empty"]
    assert rows[1] == ["s0", "120", "23", "150", "75.000%", "6.522", "-"]
    assert rows[2] == ["s1", "240", "47", "50", "25.000%", "1.064", "-"]
    assert rows[3] == ["s2", "840", "167", "0", "0.000%", "0.000", "-"]


def test_report_lists_the_empty_fraction_of_packed_samples(tmp_path, prefixes):
    training = _open(tmp_path, train=prefixes[:1], packing="best_fit", sequence_length=16)
    assert training.report_lines()[1].split()[-1] == "31.250%"  # 10 documents of 11 places in 10 samples of 16


def test_identity_holds_what_was_read_and_nothing_that_comes_later(tmp_path, prefixes):
    phases = [{"from_step": 10, "weights": {"s2": 1.0}}]
    short = _open(tmp_path, sources=_sources(prefixes[:2], (6.0, 2.0))).identity(10)
    long = _open(tmp_path, sources=_sources(prefixes, (0.75, 0.25, 0.0)), phases=phases)
    assert long.identity(10) == long.identity(0) == short
    assert short["shares of the sources"] == [[0, {"s0": 0.75, "s1": 0.25}]]
    assert short["tokens of the sources"] == {"s0": 120, "s1": 240}
    assert long.identity(11) != short
    assert long.identity(11)["tokens of the sources"] == {"s0": 120, "s1": 240, "s2": 840}
