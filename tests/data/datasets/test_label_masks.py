"""Label masks in samples: the labels of concatenated and packed samples, and the data that refuse masks."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from megalin.data.batch import IGNORED_LABEL
from megalin.data.config import DataConfig
from megalin.data.datasets.token import TokenDataset
from megalin.data.loader import ValidationLoader
from megalin.data.shards.inspection import digest_shard
from megalin.data.shards.supervised import write_supervised_shard
from megalin.data.sources import LABEL_MASKS, open_dataset, open_training
from megalin.errors import DataError
from tests.data.shard_files import mask_bytes, write_by_hand
from tests.model_runs import write_shard

VOCAB = 1000
MASKING = {"cls_token": 990, "sep_token": 991, "mask_token": 992, "pad_token": 993, "max_predictions": 3}


def _write(prefix, sequences, bits=None):
    """A shard of these sequences, with the mask `bits` of all its tokens if given; returns the prefix."""
    write_by_hand(prefix, sequences)
    Path(f"{prefix}.mask.bin").unlink(missing_ok=True)
    if bits is not None:
        Path(f"{prefix}.mask.bin").write_bytes(mask_bytes(bits))
    return str(prefix)


def _config(*prefixes, **values):
    return DataConfig(**{"train": list(prefixes), "sequence_length": 4, **values})


def _random_shards(tmp_path, rng):
    """Shards with and without masks: their prefixes, and (id, number of its sequence, bit) of every token."""
    prefixes, tokens, number = [], [], 0
    for shard in range(int(rng.integers(2, 5))):
        sequences = [rng.integers(0, VOCAB, rng.integers(0, 8)).tolist() for _ in range(8)] + [[3, 4]]
        bits = (rng.random(sum(map(len, sequences))) < 0.4).tolist()
        bits[-1] = True
        masked = shard == 0 or rng.random() < 0.5
        prefixes.append(_write(tmp_path / f"s{shard}", sequences, bits if masked else None))
        counted = iter(bits)
        for sequence in sequences:
            tokens += [(token, number, next(counted) or not masked) for token in sequence]
            number += 1
    return prefixes, tokens


@pytest.mark.parametrize("isolate", [True, False])
def test_labels_of_concatenated_samples(tmp_path, isolate):
    rng = np.random.default_rng(0)
    for _ in range(30):
        prefixes, tokens = _random_shards(tmp_path, rng)
        wanted = [
            after[0] if after[2] and (before[1] == after[1] or not isolate) else IGNORED_LABEL
            for before, after in itertools.pairwise(tokens)
        ]
        length = int(rng.integers(1, 9))
        config = _config(*prefixes, sequence_length=length, isolate_documents=isolate)
        with TokenDataset.open(config, "train", VOCAB) as dataset:
            batch = dataset.batch(np.arange(dataset.num_samples))
        assert batch.labels.flatten().tolist() == wanted[: batch.labels.numel()]
        assert batch.tokens.flatten().tolist() == [token for token, _, _ in tokens[: batch.tokens.numel()]]
        assert batch.label_counts().item() == sum(label >= 0 for label in wanted[: batch.labels.numel()])


@pytest.mark.parametrize("fit", ["first_fit", "best_fit"])
def test_packed_samples_learn_the_counted_pairs_once(tmp_path, fit):
    rng = np.random.default_rng(1)
    for _ in range(10):
        prefixes, tokens = _random_shards(tmp_path, rng)
        pairs = [pair for pair in itertools.pairwise(tokens) if pair[0][1] == pair[1][1]]
        with open_dataset(_config(*prefixes, packing=fit), "train", VOCAB, 0) as dataset:
            batch = dataset.batch(np.arange(dataset.num_samples))
            assert dataset.num_targets == len(pairs)
        kept = batch.labels != IGNORED_LABEL
        learnt = zip(batch.tokens[kept].tolist(), batch.labels[kept].tolist(), strict=True)
        assert sorted(learnt) == sorted((before[0], after[0]) for before, after in pairs if after[2])


def test_held_out_sequences_keep_their_bits(tmp_path):
    prefix = _write(tmp_path / "x", [[1, 2, 3], [4, 5, 6], [7, 8, 9]], [0, 1, 0, 0, 0, 1, 0, 1, 1])
    config = _config(prefix, sequence_length=2, split=[1, 1, 1])
    for split, wanted in (("train", [2, -100]), ("validation", [-100, 6]), ("test", [8, 9])):
        with TokenDataset.open(config, split, VOCAB) as dataset:
            (batch,) = ValidationLoader(dataset, micro_batch_size=1)
        assert batch.labels.tolist() == [wanted]


def test_split_without_a_label_is_refused(tmp_path):
    masked = _write(tmp_path / "x", [[1, 2, 3], [4, 5, 6]], [0, 1, 1, 0, 0, 0])
    config = _config(masked, sequence_length=2, validation_fraction=0.5)
    TokenDataset.open(config, "train", VOCAB).close()
    message = (
        r"x\.mask\.bin: no token of the validation split \(validation_fraction = 0.5\) counts as a label; write masks"
    )
    for packing in ("concatenate", "best_fit"):
        with pytest.raises(DataError, match=message):
            open_dataset(config.model_copy(update={"packing": packing}), "validation", VOCAB, 0)
    unmasked = _write(tmp_path / "y", [[1, 2, 3], [4, 5, 6]])
    TokenDataset.open(_config(masked, unmasked, validation_fraction=0.5), "validation", VOCAB).close()


def test_mask_that_was_left_behind_or_added_is_refused(tmp_path):
    prefix = tmp_path / "x"
    pair = [([1, 2, 3, 4, 5, 6], [False] * 5 + [True])]
    manifest, mask = Path(f"{prefix}.manifest.json"), Path(f"{prefix}.mask.bin")
    write_supervised_shard(prefix, pair, vocab_size=VOCAB)
    sealed, bits = json.loads(manifest.read_text()), mask.read_bytes()
    TokenDataset.open(_config(str(prefix)), "train", VOCAB).close()
    mask.unlink()
    earlier = {"tokens": 6, "tokenizer": {"digest": "d"}, "label_tokens": 1}
    for content in (sealed, earlier):
        manifest.write_text(json.dumps(content))
        with pytest.raises(
            DataError,
            match=r"x\.mask\.bin: missing, but by \S+x\.manifest\.json the shard was written with a label mask, "
            r"without which other tokens are learnt; restore it, or remove the manifest too so that every token is a",
        ):
            TokenDataset.open(_config(str(prefix)), "train", VOCAB)
    write_shard(prefix, [pair[0][0]])
    mask.write_bytes(bits)
    with pytest.raises(
        DataError,
        match=r"x\.mask\.bin: by \S+x\.manifest\.json the shard was written without a label mask; remove it, or, if it "
        r"was added on purpose, store its digest: megalin data inspect \S+x --digest",
    ):
        TokenDataset.open(_config(str(prefix)), "train", VOCAB)
    digest_shard(prefix)
    TokenDataset.open(_config(str(prefix)), "train", VOCAB).close()
    for content in (earlier, {"tokens": 6}):  # what earlier versions wrote beside the mask
        manifest.write_text(json.dumps(content))
        TokenDataset.open(_config(str(prefix)), "train", VOCAB).close()


def test_orders_and_samples_that_have_no_masks_refuse_them(tmp_path):
    prefix = _write(tmp_path / "x", [[1, 2, 3, 4, 5, 6]] * 5, [True] * 30)
    config = _config(prefix, order="megatron")
    remedy = (
        'use next-token samples in data.order = "megalin", or remove the mask and the manifest of the shard so that'
    )
    with pytest.raises(
        DataError, match=rf'x\.mask\.bin: data.order = "megatron" does not support label masks; {remedy}'
    ):
        open_training(config, VOCAB, seed=0, steps=2, global_batch_size=2, folder=tmp_path)
    config = _config(prefix, sequence_length=13, masking=MASKING)
    for split in ("train", "test"):
        with pytest.raises(DataError, match=rf"x\.mask\.bin: data.masking does not support label masks; {remedy}"):
            open_dataset(config, split, VOCAB, 0)


def test_identity_holds_the_masks_of_what_was_read(tmp_path):
    rng = np.random.default_rng(0)
    shards = [[rng.integers(0, 99, 12).tolist() for _ in range(10)] for _ in range(3)]

    def identity(*bits, step=1, packing="concatenate"):
        prefixes = [_write(tmp_path / f"s{k}", shards[k], bits[k]) for k in range(3)]
        sources = [{"name": "a", "paths": prefixes[:2], "weight": 1.0}, {"name": "b", "paths": prefixes[2:]}]
        sources[1]["weight"] = 0.0
        phases = [{"from_step": 10, "weights": {"b": 1.0}}]
        config = DataConfig(sources=sources, phases=phases, sequence_length=5, packing=packing)
        training = open_training(config, 100, seed=3, steps=20, global_batch_size=10, folder=tmp_path)
        with training.dataset:
            return training.identity(step)

    ones, other = [True] * 120, [True] * 119 + [False]
    plain = identity(None, None, None)
    assert LABEL_MASKS not in plain
    for packing in ("concatenate", "best_fit"):
        masks = identity(None, ones, other, packing=packing)[LABEL_MASKS]
        assert list(masks) == ["a"]
        assert masks["a"][0] is None
        assert len(masks["a"][1]) == 64
        assert identity(None, other, None, packing=packing)[LABEL_MASKS]["a"][1] != masks["a"][1]
    assert identity(None, None, other) == plain  # of a source that is not read yet
    later = identity(None, None, other, step=11)[LABEL_MASKS]
    assert later == {"b": [identity(None, other, None)[LABEL_MASKS]["a"][1]]}
