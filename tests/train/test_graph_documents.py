"""CUDA graphs of steps whose attention reads document boundaries: when one is valid, dropped and captured again."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from megalin.data.batch import AnyBatch, Batch
from megalin.errors import ConfigError
from megalin.ops.documents import DocumentBounds, document_bounds
from megalin.train.cuda_graphs import WARM_UP_STEPS
from megalin.train.graph_choice import LEAST_REPLAYS, MOST_DROPS, recaptures_obstacle
from megalin.train.graph_documents import GraphDocuments
from megalin.train.launch_checks import check_launch
from tests.train.test_cuda_graphs import GIB, FakeDevice, run_config

LENGTH = 64


def batch_of(*lengths: int) -> Batch:
    """One sequence of documents of these lengths; the last one has the rest."""
    lengths = (*lengths, LENGTH - sum(lengths))
    ids = torch.repeat_interleave(torch.arange(len(lengths), dtype=torch.int32), torch.tensor(lengths))[None]
    tokens = torch.randint(99, (1, LENGTH))
    return Batch(tokens, tokens, ids, torch.zeros(1, dtype=torch.int64))


WHOLE = ()
"""Lengths of a sequence that is one document."""


def test_bounds_are_powers_of_two_common_to_the_micro_batches_and_grow():
    documents = GraphDocuments()
    step = [batch_of(5, 5, 5, 5, 5), batch_of(17, 20)]
    assert not documents.admit(step)
    assert [document_bounds(batch.document_ids) for batch in step] == [DocumentBounds(8, 64)] * 2
    assert documents.admit([batch_of(1, 1, 1, 1, 1, 1, 1), batch_of(32)])
    grown = [batch_of(*[4] * 8), batch_of(32)]
    assert not documents.admit(grown)
    assert document_bounds(grown[1].document_ids) == DocumentBounds(16, 64)
    assert documents.admit([batch_of(32), batch_of(3)])


def test_a_micro_batch_of_whole_sequences_is_another_step():
    documents = GraphDocuments()
    steps: list[list[AnyBatch]] = [[batch_of(9), batch_of(*first)] for first in ((5,), WHOLE, WHOLE, (5,))]
    assert [documents.admit(step) for step in steps] == [False, False, True, False]
    assert isinstance(steps[1][1], Batch)
    assert document_bounds(steps[1][1].document_ids) is None


@pytest.mark.parametrize("lengths", [(9,), WHOLE])
def test_the_host_reads_no_documents_of_declared_batches(monkeypatch, lengths):
    documents, recorded = GraphDocuments(), batch_of(*lengths)
    documents.admit([batch_of(*lengths)])
    documents.declare([recorded])
    monkeypatch.setattr(torch.Tensor, "cpu", None)
    found = document_bounds(recorded.document_ids)
    assert found == (DocumentBounds(2, 64) if lengths else None)


@pytest.mark.parametrize("parallel", [{}, {"tp": 2}, {"cp": 2}])
def test_graphs_of_attention_that_reads_documents_are_refused_on_several_ranks(parallel):
    softmax, mask = ({"type": "softmax", "num_heads": 2, "backend": backend} for backend in ("auto", "mask"))
    config = run_config(softmax, graphs=True, parallel=parallel)
    with pytest.raises(ConfigError, match=r"true with the mixer softmax, for which the host reads .* on 2 ranks; use"):
        check_launch(config, 2)
    check_launch(run_config(softmax, parallel=parallel), 2)
    check_launch(run_config(mask, graphs=True, parallel=parallel), 2)
    check_launch(run_config(softmax, graphs=True), 1)


class Steps(FakeDevice):
    """Steps of one micro-batch; records which were replays, and with which tensors."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(monkeypatch, captured=4 * GIB, documents=True)

    def _replay(self) -> None:
        super()._replay()
        (recorded,) = self.graph._batches
        assert all(torch.equal(*pair) for pair in zip(recorded[:4], self.given[:4], strict=True))
        assert document_bounds(recorded.document_ids) == document_bounds(self.given.document_ids)

    def step(self, *lengths: int) -> bool:
        """Runs a step; returns whether it was a replay."""
        replays, self.given = self.replays, batch_of(*lengths)
        self.model.zero_grad()
        self.graph.accumulate_gradients([self.given])
        assert self.model.weight.grad is not None
        return self.replays > replays

    def steps(self, lengths: Sequence[Sequence[int]]) -> list[bool]:
        return [self.step(*each) for each in lengths]


def test_a_graph_replays_batches_of_fewer_and_shorter_documents(monkeypatch):
    device = Steps(monkeypatch)
    assert device.steps([(20, 20), (4,), (30,), (20, 20), (60,), (2, 3, 4)]) == [False] * WARM_UP_STEPS + [True] * 3
    assert device.eager_calls == WARM_UP_STEPS + 1


def test_a_batch_outside_of_the_bounds_is_eager_and_the_next_one_captured(monkeypatch):
    device = Steps(monkeypatch)
    device.steps([(20, 20)] * (WARM_UP_STEPS + 1))
    reserved = device.reserved
    assert not device.step(*[4] * 8)
    assert not device.graph.is_captured, "the graph's memory is free for the eager step"
    assert device.steps([(20, 20), (4,) * 8, (30, 12)]) == [True] * 3
    assert device.reserved == reserved
    assert device.eager_calls == WARM_UP_STEPS + 3  # and two captures
    (line,) = device.graph.report_lines()
    assert "one launch a step from here on" in line


def test_bounds_may_grow_in_the_first_steps_and_right_after_them(monkeypatch):
    device = Steps(monkeypatch)
    lengths = [WHOLE, (40,), (4,) * 8, WHOLE, (20, 20), (20, 20), (20, 20)]
    assert device.steps(lengths) == [False] * 5 + [True] * 2
    assert device.eager_calls == 6


def test_a_run_that_changes_between_packed_and_whole_sequences_stays_eager(monkeypatch):
    device = Steps(monkeypatch)
    device.steps([WHOLE] * WARM_UP_STEPS)
    lengths = [[WHOLE, WHOLE, (20,), (20,)][step % 4] for step in range(4 * MOST_DROPS)]
    device.steps(lengths)
    assert device.replays == MOST_DROPS + 2
    assert not device.graph.is_captured
    _, line = device.graph.report_lines()
    assert "CUDA graphs: none: more or longer documents, or sequences of one document in other micro-batches" in line
    assert f"changed its kernels {MOST_DROPS + 1} times in {MOST_DROPS + 2} replays" in line


def test_a_graph_is_captured_again_while_it_replays_enough():
    assert recaptures_obstacle(drops=MOST_DROPS, replays=0) is None
    drops = MOST_DROPS + 1
    assert recaptures_obstacle(drops=drops, replays=LEAST_REPLAYS * drops) is None
    assert recaptures_obstacle(drops=drops, replays=LEAST_REPLAYS * drops - 1) is not None
