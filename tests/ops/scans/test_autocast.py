"""Scans under `torch.autocast`: matmuls and states keep their own dtypes, and the results their bits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megalin.ops.scans.fixed_decay import decay_scan_reference
from megalin.ops.scans.fixed_decay_step import decay_step_reference
from megalin.ops.scans.scalar_decay import scalar_decay_scan_reference
from megalin.ops.scans.states import decay_state_reference, selected_state, tpe_state
from megalin.ops.scans.tpe import tpe, tpe_reference
from megalin.ops.scans.two_sided_decay import two_sided_scan
from megalin.ops.scans.vector_decay import vector_decay_scan_reference
from megalin.ops.scans.vector_decay_step import vector_decay_step_reference

BATCH, LENGTH, HEADS, KEY, VALUE, TERMS = 2, 150, 2, 6, 10, 4


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


Q, K = (normal(BATCH, LENGTH, HEADS, KEY, seed=seed) for seed in (0, 1))
V = normal(BATCH, LENGTH, HEADS, VALUE, seed=2)
SLOPES = torch.tensor([0.01, 0.1])
KEY_DECAY, VALUE_DECAY = (-0.1 * normal(*x.shape, seed=3).abs() for x in (K, V))
STATE = normal(BATCH, HEADS, KEY, VALUE, seed=4)
X, TPE_STATE = normal(BATCH, LENGTH, VALUE, seed=5), normal(BATCH, VALUE, TERMS, seed=6)
TERM = normal(VALUE, TERMS, seed=7), -0.1 * normal(TERMS, seed=8).abs()

CALLS: dict[str, Callable[[torch.dtype], object]] = {
    "decay_scan": lambda to: decay_scan_reference(Q.to(to), K.to(to), V.to(to), SLOPES),
    "decay_state": lambda to: (decay_state_reference(K.to(to), V.to(to), SLOPES),),
    "decay_step": lambda to: decay_step_reference(Q[:, 0].to(to), K[:, 0].to(to), V[:, 0].to(to), SLOPES, STATE),
    "scalar_decay_scan": lambda to: scalar_decay_scan_reference(Q.to(to), K.to(to), V.to(to), KEY_DECAY[..., 0]),
    "vector_decay_scan": lambda to: vector_decay_scan_reference(Q.to(to), K.to(to), V.to(to), KEY_DECAY),
    "vector_decay_step": lambda to: vector_decay_step_reference(
        Q[:, 0].to(to), K[:, 0].to(to), V[:, 0].to(to), KEY_DECAY[:, 0], STATE
    ),
    "selected_state": lambda to: (selected_state(K.to(to), V.to(to), KEY_DECAY),),
    "two_sided_scan": lambda to: two_sided_scan(Q.to(to), K.to(to), V.to(to), KEY_DECAY, VALUE_DECAY),
    "tpe": lambda to: tpe_reference(X.to(to), *TERM, state=TPE_STATE),
    "tpe_state": lambda to: (tpe_state(X.to(to), *TERM),),
    "tpe by its kernels": lambda to: tpe(X[:, :20].to(to), *TERM, state=TPE_STATE, backend="triton"),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_results_have_the_bits_of_those_without_autocast(name, dtype):
    expected = CALLS[name](dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = CALLS[name](dtype)
        assert torch.is_autocast_enabled("cpu")
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)
    assert found[-1].dtype == torch.float32  # the state
