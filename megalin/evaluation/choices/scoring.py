"""Scores of the requests of a task under a model, in two ways with one result.

`score_packed` works on any mesh and inside a training run: requests are documents of packed samples.
`score_carried` works in one process, and under tensor and data parallelism with whole models: each prompt runs once,
and its state is copied into all of its answers, which for mixers of constant state costs the same at any length of the
prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import torch
from torch import Tensor

from megalin.data.batch import batch_to, split_tokens
from megalin.data.loader import ValidationLoader
from megalin.evaluation.choices.carried_state import Scored, carried_batches, prompt_groups
from megalin.evaluation.choices.encoding import EncodedRequest
from megalin.evaluation.choices.metrics import RequestScores
from megalin.evaluation.choices.partial import EVERY_BATCHES, PartialScores, PartialSums
from megalin.evaluation.choices.rows import RequestRows, ScoredRequest
from megalin.evaluation.suite import Decoder, ReportProgress, no_report
from megalin.model.language_model import LanguageModel
from megalin.parallel.mesh import Mesh
from megalin.train.validation import evaluating


@torch.no_grad()
def score_packed(
    model: Decoder,
    requests: Sequence[ScoredRequest],
    mesh: Mesh,
    *,
    micro_batch_size: int,
    sequence_length: int,
    on_progress: ReportProgress = no_report,
    partial: PartialScores | None = None,
) -> RequestScores:
    """Scores of all requests on every rank; all ranks of the mesh call it with the same requests and run the same
    number of batches.

    Args:
        requests: of at most `sequence_length` + 1 ids.
        micro_batch_size: samples of a batch; each has `sequence_length` tokens.
        partial: file of partial scores, from which an earlier evaluation goes on.
    """
    rows = RequestRows(requests, sequence_length=sequence_length)
    loader = ValidationLoader(
        rows, micro_batch_size=micro_batch_size, dp_rank=mesh.samples.rank, dp_size=mesh.samples.size
    )
    sums = _Sums(requests, mesh, len(loader), partial)
    with evaluating(model):
        for done, batch in enumerate(islice(loader, sums.batches, None), sums.batches + 1):
            numbers = mesh.cp.shard(rows.request_numbers(batch.sample_ids)).to(mesh.device, non_blocking=True)
            batch = batch_to(split_tokens(batch, mesh.cp), mesh.device)
            scores = model.token_scores(batch.inputs())
            if scores is not None:
                sums.add(Scored(numbers, batch.labels, scores))
            sums.end_batch()
            on_progress(done, len(loader))
    return sums.result()


@torch.no_grad()
def score_carried(
    model: LanguageModel,
    requests: Sequence[EncodedRequest],
    mesh: Mesh,
    *,
    on_progress: ReportProgress = no_report,
    partial: PartialScores | None = None,
) -> RequestScores:
    """Scores of all requests, each distinct prompt of which runs once; a collective on a mesh of data and tensor
    parallelism alone. The ranks of the data axis divide the prompts; each has the whole model, on `mesh.tp`.

    Args:
        partial: file of partial scores, from which an earlier evaluation goes on; on one data-parallel rank.
    """
    ranks = mesh.samples
    assert mesh.cp.size == mesh.pp.size == 1, (mesh.cp.size, mesh.pp.size)
    assert partial is None or ranks.size == 1, ranks.size
    groups = prompt_groups(model, requests, rank=ranks.rank, size=ranks.size)
    total = sum(len(numbers) for group in groups for numbers in group)
    sums = _Sums(requests, mesh, len(groups), partial)
    done = sum(len(numbers) for group in groups[: sums.batches] for numbers in group)
    with evaluating(model):
        for group in groups[sums.batches :]:
            for scored in carried_batches(model, requests, group, mesh.device):
                sums.add(scored)
                done += len(scored.numbers)
                on_progress(done, total)
            sums.end_batch()
    return sums.result()


class _Sums:
    """Sums over the tokens of each request, by its number; on this rank until `result` adds those of all ranks and
    those of an earlier evaluation.

    Attributes:
        batches: finished batches, those of an earlier evaluation included.
    """

    def __init__(
        self, requests: Sequence[ScoredRequest], mesh: Mesh, num_batches: int, partial: PartialScores | None
    ) -> None:
        self._mesh, self._num_batches, self._partial = mesh, num_batches, partial
        self._expected = torch.tensor([request.num_answer_tokens for request in requests], dtype=torch.int64)
        self._nats = torch.zeros(len(requests), dtype=torch.float64, device=mesh.device)
        # [2, N]: answer tokens, and those of them that are the likeliest.
        self._counts = torch.zeros(2, len(requests), dtype=torch.int64, device=mesh.device)
        self._earlier = None if partial is None else partial.read(len(requests), num_batches)
        self.batches = 0 if self._earlier is None else self._earlier.batches

    def add(self, scored: Scored) -> None:
        """Adds scores: numbers, labels and scores [B, T]."""
        index = scored.numbers.flatten()
        self._nats.index_add_(0, index, scored.scores.losses.flatten().double())
        flags = torch.stack([scored.has_label(), scored.scores.greedy]).flatten(1).long()
        self._counts.index_add_(1, index, flags)

    def end_batch(self) -> None:
        """Counts a batch whose scores are added; from time to time it writes the partial sums, as a collective."""
        self.batches += 1
        if self._partial is not None and self.batches % EVERY_BATCHES == 0:
            self._partial.write(self._totals(), self._num_batches)

    def result(self) -> RequestScores:
        """The scores of every request on every rank; a collective. Each token of an answer counted once."""
        _, nats, counts = self._totals()
        wrong = (counts[0] != self._expected).nonzero().flatten().tolist()
        assert not wrong, f"answer tokens of requests {wrong[:5]}: {counts[0][wrong[:5]]}, {self._expected[wrong[:5]]}"
        return RequestScores(-nats.numpy(), counts[1].numpy(), self._expected.numpy())

    def _totals(self) -> PartialSums:
        nats, counts = self._over_ranks(self._nats), self._over_ranks(self._counts)
        if self._earlier is not None:
            nats, counts = nats + self._earlier.nats, counts + self._earlier.counts
        return PartialSums(self.batches, nats, counts)

    def _over_ranks(self, value: Tensor) -> Tensor:
        # Tensor-parallel ranks have equal losses, each token's once; the data axis holds the context-parallel ranks.
        return self._mesh.sum_over_data(self._mesh.pp.sum(value)).cpu()
