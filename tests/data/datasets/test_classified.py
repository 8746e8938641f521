"""Documents with a class: samples against the documents that were written, and refused shards and settings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from megalin.data.config import DataConfig
from megalin.data.datasets.classified import ClassifiedDataset
from megalin.data.sources import LABEL_MASKS, open_dataset, open_training
from megalin.errors import DataError
from tests.data.shard_files import mask_bytes, write_by_hand

VOCAB, FIRST, CLASSES = 50, 40, 3
DOCUMENTS = [[5, 6, 7, 1, 40], [8, 1, 42], [9, 10, 11, 12, 1, 41], [13, 1, 40]]
"""Tokens, a separator, and the class: id 40, 41 or 42."""


def write(prefix: Path, documents: Sequence[Sequence[int]], bits: Sequence[bool] | None = None) -> str:
    """A shard whose mask marks the last token of each document, or `bits`."""
    write_by_hand(prefix, documents)
    if bits is None:
        bits = [place == len(document) - 1 for document in documents for place in range(len(document))]
    Path(f"{prefix}.mask.bin").write_bytes(mask_bytes(bits))
    return str(prefix)


def config(*prefixes: str, separator_tokens: int = 1, **values) -> DataConfig:
    table = {"first_class_id": FIRST, "num_classes": CLASSES, "separator_tokens": separator_tokens}
    return DataConfig(**{"train": list(prefixes), "sequence_length": 6, "classification": table, **values})


@pytest.mark.parametrize("separator_tokens", [0, 1])
def test_samples_are_the_documents_without_their_class(tmp_path, separator_tokens):
    prefixes = [write(tmp_path / "a", DOCUMENTS[:3]), write(tmp_path / "b", DOCUMENTS[3:])]
    with open_dataset(config(*prefixes, separator_tokens=separator_tokens), "train", VOCAB, 0) as dataset:
        assert (dataset.num_samples, dataset.num_tokens) == (4, sum(map(len, DOCUMENTS)))
        batch = dataset.batch(np.array([3, 0, 2]))
    for row, document in enumerate([DOCUMENTS[3], DOCUMENTS[0], DOCUMENTS[2]]):
        text = document[: -1 - separator_tokens]
        assert batch.tokens[row].tolist() == text + [0] * (6 - len(text))
        assert batch.valid[row].tolist() == [True] * len(text) + [False] * (6 - len(text))
        assert batch.sequence_labels[row] == document[-1] - FIRST
    assert batch.sample_ids.tolist() == [3, 0, 2]
    assert batch.label_counts().tolist() == [3]
    assert set(batch.inputs()) == {"tokens", "token_types", "valid", "sequence_labels"}
    assert not batch.token_types.any()


def test_held_out_documents_are_the_last_ones(tmp_path):
    held_out = config(write(tmp_path / "a", DOCUMENTS), validation_fraction=0.25)
    with open_dataset(held_out, "validation", VOCAB, 0) as dataset:
        assert dataset.batch(np.arange(dataset.num_samples)).tokens[:, 0].tolist() == [13]
    with open_dataset(held_out, "train", VOCAB, 0) as dataset:
        assert dataset.num_samples == 3


def test_masks_are_part_of_what_a_run_reads(tmp_path):
    options = {"seed": 0, "steps": 2, "global_batch_size": 2, "folder": tmp_path}
    training = open_training(config(write(tmp_path / "a", DOCUMENTS)), VOCAB, **options)
    with training.dataset:
        (digest,) = training.identity(1)[LABEL_MASKS]["train"]
    assert len(digest) == 64


LAST = [False] * 4 + [True]


@pytest.mark.parametrize(
    ("documents", "bits", "message"),
    [
        ([[1, 2, 3, 1, 43]], None, r"a: token 4 is 43, but the classes of data.classification have the ids 40 to 42"),
        ([[1, 2, 3, 1, 39]], None, r"a: token 4 is 39, but the classes"),
        (DOCUMENTS[:1], [False] * 3 + [True] * 2, r"a\.mask\.bin: marks 2 of the tokens 0 to 4"),
        ([*DOCUMENTS[:1], [2, 1, 40]], [*LAST, False, True, False], r"a\.mask\.bin: marks 1 of the tokens 5 to 7"),
        ([*DOCUMENTS[:1], [2, 1, 40]], [*LAST, False, False, False], r"marks 0 of the tokens 5 to 7, a document whose"),
    ],
)
def test_bad_documents_are_refused_where_they_are_read(tmp_path, documents, bits, message):
    dataset = ClassifiedDataset.open(config(write(tmp_path / "a", documents, bits)), "train", VOCAB)
    with dataset, pytest.raises(DataError, match=message):
        dataset.batch(np.arange(dataset.num_samples))


@pytest.mark.parametrize(
    ("documents", "message"),
    [
        (
            [[2, 1, 40], [1] * 9 + [40]],
            r"at token 3 has 10 tokens, but needs at most data.sequence_length = 6 .*= 8, or",
        ),
        ([DOCUMENTS[0], [1, 40]], r"at token 5 has 2 tokens, but needs at least one token besides a class and data"),
        ([DOCUMENTS[0], []], r"1 documents have no token, not even a class; remove them"),
    ],
)
def test_lengths_are_checked_on_open(tmp_path, documents, message):
    with pytest.raises(DataError, match=message):
        ClassifiedDataset.open(config(write(tmp_path / "a", documents)), "train", VOCAB)


def test_shards_without_a_mask_or_documents_are_refused(tmp_path):
    prefix = str(write_by_hand(tmp_path / "a", DOCUMENTS))
    with pytest.raises(DataError, match=r"a\.mask\.bin: missing, but data.classification reads the class"):
        ClassifiedDataset.open(config(prefix), "train", VOCAB)
    with pytest.raises(DataError, match="empty corpus: the train split"):
        ClassifiedDataset.open(config(write(tmp_path / "b", [])), "train", VOCAB)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"packing": "best_fit"}, 'packing = "best_fit" has no effect with classification'),
        ({"isolate_documents": False}, "isolate_documents = false has no effect with classification"),
        ({"order": "megatron"}, 'classification: order = "megatron" gives next-token samples only'),
        ({"masking": {"max_predictions": 2}}, "classification and masking make different samples; remove one of them"),
    ],
)
def test_settings_of_other_samples_are_refused(values, message):
    with pytest.raises(ValueError, match=message):
        config("a", **values)
