"""The training loss, which keeps no logits, in the comparison: its value, its gradients and its kernel."""

from __future__ import annotations

import os

import pytest
from torch import Tensor

from megalin.ops.dispatch.backend import VARIABLE, used
from megalin.parallel.embedding import VocabParallelEmbedding
from megalin.verify.case import Case
from megalin.verify.comparison import TensorError
from megalin.verify.run import verify
from tests.ranks import run_ranks
from tests.verify.test_verify import PRESET, case

LOSS_SUM = VocabParallelEmbedding.loss_sum


def _wrong_value(self: VocabParallelEmbedding, x: Tensor, labels: Tensor, **options: float) -> Tensor:
    return LOSS_SUM(self, x, labels, **options) + 1e-3


def _wrong_gradient(self: VocabParallelEmbedding, x: Tensor, labels: Tensor, **options: float) -> Tensor:
    loss = LOSS_SUM(self, x, labels, **options)
    return loss + 1e-3 * (loss - loss.detach())


def _no_weight_gradient(self: VocabParallelEmbedding, x: Tensor, labels: Tensor, **options: float) -> Tensor:
    self.weight.requires_grad_(False)
    try:
        return LOSS_SUM(self, x, labels, **options)
    finally:
        self.weight.requires_grad_(True)


FAULTS = {"value": _wrong_value, "gradient": _wrong_gradient, "weight": _no_weight_gradient}


def _verify_with(fault: str, case: Case) -> list[TensorError]:
    VocabParallelEmbedding.loss_sum = FAULTS[fault]  # type: ignore[method-assign]
    try:
        return verify(case)
    finally:
        VocabParallelEmbedding.loss_sum = LOSS_SUM  # type: ignore[method-assign]


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_the_loss_that_trains_alone_is_seen(fault: str, tp: int):
    errors = run_ranks(tp, _verify_with, fault, case(PRESET, tp=tp))[0]
    wrong = {error.name.partition(":")[0].partition(".")[0] for error in errors if not error.passed}
    assert not wrong & {"logits", "token_losses"}
    assert ("loss" if fault == "value" else "gradient") in wrong


def _verify_with_the_kernel(case: Case) -> tuple[list[TensorError], str]:
    import tests.interpreter  # noqa: F401

    os.environ[VARIABLE] = "linear_cross_entropy=triton"
    return verify(case), used()["linear_cross_entropy"].backend


@pytest.mark.parametrize("tp", [1, 2])
def test_the_fused_loss_over_a_split_vocabulary_agrees_with_one_process(tp: int):
    (errors, backend), *_ = run_ranks(tp, _verify_with_the_kernel, case(PRESET, tp=tp, dtype="float32"))
    assert backend == "triton"
    assert [error for error in errors if not error.passed] == []
