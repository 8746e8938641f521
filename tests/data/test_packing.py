"""Labels shifted on the whole window, and documents kept apart by their true borders."""

import numpy as np
import torch

from megalin.data.packing import IGNORED_LABEL, pack, pad_rows


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
    assert [field.dtype for field in batch] == [torch.int64, torch.int64, torch.int32, torch.int64]


def test_batch_owns_its_memory():
    windows, pieces = np.array([[1, 2, 3]]), np.zeros((1, 3), np.int32)
    batch = pack(windows, pieces, np.array([0]), isolate_documents=True)
    windows[:] = 99
    pieces[:] = 5
    assert batch.tokens.tolist() == [[1, 2]]
    assert batch.labels.tolist() == [[2, 3]]
    assert batch.document_ids.tolist() == [[0, 0]]


def test_padding_rows_have_no_valid_label():
    batch = pad_rows(_pack([1, 2, 3], [0, 0, 1]), 3)
    assert batch.tokens.shape == batch.labels.shape == batch.document_ids.shape == (3, 2)
    assert (batch.labels[1:] == IGNORED_LABEL).all()
    assert batch.labels[0].tolist() == [2, -100]
    assert batch.sample_ids.tolist() == [7, -1, -1]
