"""Copies of batches to a GPU."""

import numpy as np
import torch

from megalin.data.batch import batch_to, pack, pinned
from megalin.ops.documents import find_documents


def test_pinned_batch_reaches_the_device_unchanged():
    windows = np.arange(4 * 9).reshape(4, 9)
    batch = pack(windows, np.zeros((4, 9), np.int32), np.arange(4), isolate_documents=True)
    ready = pinned(batch)
    assert all(tensor.is_pinned() for tensor in ready if tensor is not None)
    moved = batch_to(ready, torch.device("cuda"))
    assert moved.draw is None
    assert all(torch.equal(there.cpu(), here) for there, here in zip(moved[:-1], batch[:-1], strict=True))


def test_documents_of_a_batch_are_found_while_the_device_is_busy():
    pieces = np.array([[0, 0, 1, 1, 1, 2]], np.int32)
    batch = pinned(pack(np.arange(6)[None], pieces, np.arange(1), isolate_documents=True))
    torch.cuda._sleep(10**9)
    before = torch.cuda.Event()
    before.record()
    moved = batch_to(batch, torch.device("cuda"))
    torch.cuda.set_sync_debug_mode("error")
    try:
        documents = find_documents(moved.document_ids)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not before.query(), "the host has waited for the device"
    assert documents.offsets.tolist() == [0, 2, 5, 5, 5]
    assert documents.sizes.tolist() == [2, 3]
