"""Batches: labels shifted within the window, documents separated at their exact boundaries, shards of ranks."""

import numpy as np
import torch

from megalin.data.batch import (
    IGNORED_LABEL,
    EncoderBatch,
    batch_to,
    pack,
    pad_samples,
    split_tokens,
    take_samples,
    with_draw,
)
from megalin.ops.documents import find_documents
from megalin.parallel.collectives import Axis
from megalin.parallel.context_parallel import ContextParallel


def _pack(window, pieces, **kwargs):
    kwargs.setdefault("isolate_documents", True)
    return pack(np.array([window]), np.array([pieces], np.int32), np.array([7]), **kwargs)


def test_labels_are_the_next_ids_and_end_with_the_document():
    batch = _pack([10, 11, 12, 20, 21, 30], [0, 0, 0, 1, 1, 2])
    assert batch.tokens.tolist() == [[10, 11, 12, 20, 21]]
    assert batch.labels.tolist() == [[11, 12, -100, 21, -100]]
    assert batch.document_ids.tolist() == [[0, 0, 0, 1, 1]]
    assert batch.sample_ids.tolist() == [7]


def test_document_that_fills_the_window_has_every_label():
    assert _pack([1, 2, 3], [0, 0, 0]).labels.tolist() == [[2, 3]]


def test_documents_of_one_token_have_no_label():
    batch = _pack([1, 2, 3], [0, 1, 2])
    assert batch.labels.tolist() == [[-100, -100]]
    assert batch.document_ids.tolist() == [[0, 1]]


def test_documents_run_on_when_they_are_not_isolated():
    batch = _pack([10, 11, 20, 21], [0, 0, 1, 1], isolate_documents=False)
    assert batch.labels.tolist() == [[11, 20, 21]]
    assert batch.document_ids.tolist() == [[0, 0, 0]]


def test_dtypes_are_those_of_the_contract():
    batch = _pack([1, 2, 3], [0, 0, 1])
    assert [field.dtype for field in batch[:4]] == [torch.int64, torch.int64, torch.int32, torch.int64]
    assert batch.draw is None


def test_batch_owns_its_memory():
    windows, pieces = np.array([[1, 2, 3]]), np.zeros((1, 3), np.int32)
    batch = pack(windows, pieces, np.array([0]), isolate_documents=True)
    windows[:] = 99
    pieces[:] = 5
    assert batch.tokens.tolist() == [[1, 2]]
    assert batch.labels.tolist() == [[2, 3]]
    assert batch.document_ids.tolist() == [[0, 0]]


def test_padding_samples_have_no_valid_label():
    batch = pad_samples(_pack([1, 2, 3], [0, 0, 1]), 3)
    assert batch.tokens.shape == batch.labels.shape == batch.document_ids.shape == (3, 2)
    assert (batch.labels[1:] == IGNORED_LABEL).all()
    assert batch.labels[0].tolist() == [2, -100]
    assert batch.sample_ids.tolist() == [7, -1, -1]


def _shards(batch, size):
    return [split_tokens(batch, ContextParallel(Axis("cp", size, rank))) for rank in range(size)]


def test_context_parallel_ranks_shard_tokens_and_labels_at_the_same_places():
    batch = _pack([10, 11, 12, 20, 21], [0, 0, 0, 1, 1])
    shards = _shards(batch, 2)
    assert [shard.tokens.tolist() for shard in shards] == [[[10, 11]], [[12, 20]]]
    assert [shard.labels.tolist() for shard in shards] == [[[11, 12]], [[-100, 21]]]
    assert [shard.document_ids.tolist() for shard in shards] == [[[0, 0]], [[0, 1]]]
    assert [shard.sample_ids.tolist() for shard in shards] == [[7], [7]]


def _pair(predictions):
    rows = torch.arange(12).view(2, 6)
    positions = torch.tensor([[0, 2, 3, 5, 0][:predictions], [1, 4, 0, 0, 0][:predictions]])
    labels = torch.tensor([[7, 8, 9, 6, -100][:predictions], [5, 4, -100, -100, -100][:predictions]])
    return EncoderBatch(rows, rows // 3, rows < 10, positions, labels, torch.tensor([0, 1]), torch.tensor([3, 4]))


def test_context_parallel_ranks_shard_the_predictions_of_an_encoder():
    shards = _shards(_pair(5), 3)
    assert [shard.tokens.tolist() for shard in shards] == [[[0, 1], [6, 7]], [[2, 3], [8, 9]], [[4, 5], [10, 11]]]
    assert [shard.valid.tolist() for shard in shards][2] == [[True, True], [False, False]]
    assert [shard.token_types.tolist() for shard in shards][1] == [[0, 1], [2, 3]]
    assert [shard.masked_positions.tolist() for shard in shards] == [[[0, 2, 3, 5, 0, 0], [1, 4, 0, 0, 0, 0]]] * 3
    assert [shard.masked_labels.tolist() for shard in shards] == [
        [[7, 8], [5, 4]],
        [[9, 6], [-100, -100]],
        [[-100, -100], [-100, -100]],
    ]
    assert [shard.sequence_labels.tolist() for shard in shards] == [[0, 1], [-100, -100], [-100, -100]]
    assert sum(shard.label_counts() for shard in shards).tolist() == _pair(5).label_counts().tolist() == [6, 2]


def test_samples_without_predictions_have_none_on_any_rank():
    shards = _shards(_pair(0), 3)
    assert [list(shard.inputs()) for shard in shards] == [["tokens", "token_types", "valid", "sequence_labels"]] * 3
    assert sum(shard.label_counts() for shard in shards).tolist() == [2]


def test_numbers_of_samples_stay_with_them():
    batch = with_draw(_pack([1, 2, 3], [0, 0, 1]), torch.tensor([2**40]))
    assert pad_samples(batch, 2).draw.tolist() == [2**40, 0]
    assert take_samples(pad_samples(batch, 3), torch.tensor([2, 0])).draw.tolist() == [0, 2**40]
    assert split_tokens(batch, ContextParallel(Axis("cp", 2, 1))).draw.tolist() == [2**40]
    assert list(batch.inputs()) == ["tokens", "labels", "document_ids", "draw"]
    assert list(batch._replace(draw=None).inputs()) == ["tokens", "labels", "document_ids"]


def test_documents_of_a_batch_on_a_device_are_found_without_reading_it():
    """The meta device has no values to read."""
    batch = batch_to(_pack([10, 11, 12, 20, 21, 30], [0, 0, 0, 1, 1, 2]), torch.device("meta"))
    documents = find_documents(batch.document_ids)
    assert documents.ids is batch.document_ids
    assert documents.offsets is not None
    assert documents.sizes is not None
    assert (documents.offsets.shape, documents.offsets.dtype) == ((5,), torch.int32)
    assert (documents.offsets.device.type, documents.sizes.tolist()) == ("meta", [2, 3])
