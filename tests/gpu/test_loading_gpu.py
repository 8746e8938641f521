"""Copies of batches to a GPU."""

import numpy as np
import torch

from megalin.data.batch import batch_to, pack, pinned


def test_pinned_batch_reaches_the_device_unchanged():
    windows = np.arange(4 * 9).reshape(4, 9)
    batch = pack(windows, np.zeros((4, 9), np.int32), np.arange(4), isolate_documents=True)
    ready = pinned(batch)
    assert all(tensor.is_pinned() for tensor in ready if tensor is not None)
    moved = batch_to(ready, torch.device("cuda"))
    assert moved.draw is None
    assert all(torch.equal(there.cpu(), here) for there, here in zip(moved[:-1], batch[:-1], strict=True))
