"""The held-out loss by the number of earlier tokens: whether it keeps falling with more context."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megalin.data.batch import batch_to, split_tokens
from megalin.data.config import SplitName
from megalin.data.loader import ValidationLoader
from megalin.data.sources import open_dataset
from megalin.errors import ConfigError
from megalin.evaluation.choices.metrics import Metric
from megalin.evaluation.held_out import split_settings
from megalin.evaluation.suite import Decoder, ReportProgress, TaskResult, no_report
from megalin.model.config import EncoderConfig
from megalin.parallel.cross_entropy import IGNORED_LABEL
from megalin.parallel.mesh import Mesh
from megalin.train.config import RunConfig
from megalin.train.validation import evaluating

FIRST_BUCKET = 64
"""Earlier tokens of the first bucket; each further one ends at twice as many."""


class PositionSuite:
    """Mean loss of the labels with 0 to 63 earlier tokens of their document in the sample, 64 to 127, 128 to 255, ...

    Metrics: `loss` over all labels, and that of each bucket by the name of its range, in nats a token.
    """

    name = "positions"
    generates = False

    def __init__(self, config: RunConfig, *, split: SplitName = "validation", limit: int | None = None) -> None:
        """`limit`: samples, the first ones of the split; None: all.

        Raises:
            ConfigError: an encoder, a run without the split, or a limit below 1.
        """
        if isinstance(config.model, EncoderConfig):
            raise ConfigError('the suite positions needs a decoder, but model.kind = "encoder"')
        if not config.data.has(split):
            raise ConfigError(f"the suite positions reads data.{split}, which the run does not have; name shards there")
        if limit is not None and limit < 1:
            raise ConfigError(f"limit = {limit} leaves no sample; use at least 1, or leave it out for all")
        self._config, self._split, self._limit = config, split, limit
        self._result_name = str(split) if limit is None else f"{split}[:{limit}]"

    def result_names(self) -> Sequence[str]:
        """The split."""
        return [self._result_name]

    def settings(self, key: str) -> dict[str, Any]:
        """Everything besides the weights that the result depends on, as JSON."""
        paths = self._config.data.paths(self._split)
        return split_settings(self._config, self._split, paths) | {"limit": self._limit}

    @torch.no_grad()
    def run(
        self, key: str, model: Decoder, mesh: Mesh, *, carry: bool = False, on_progress: ReportProgress = no_report
    ) -> TaskResult:
        """Evaluates the split; a collective. `carry` has no effect.

        Raises:
            DataError: data that is invalid or missing.
        """
        started, config = time.perf_counter(), self._config
        edges = bucket_edges(config.data.sequence_length)
        sums = torch.zeros(2, len(edges), dtype=torch.float64, device=mesh.device)  # nats, labels
        inner = torch.tensor(edges[1:], device=mesh.device)
        with (
            open_dataset(config.data, self._split, config.model.vocab_size, config.train.seed) as dataset,
            evaluating(model),
        ):
            loader: ValidationLoader[Any] = ValidationLoader(
                dataset,
                micro_batch_size=config.train.micro_batch_size,
                dp_rank=mesh.samples.rank,
                dp_size=mesh.samples.size,
                max_samples=self._limit,
            )
            for done, batch in enumerate(loader, 1):
                places = mesh.cp.shard(places_in_documents(batch.document_ids)).to(mesh.device)
                batch = batch_to(split_tokens(batch, mesh.cp), mesh.device)
                scores = model.token_scores(batch.inputs())
                if scores is not None:
                    buckets = torch.bucketize(places, inner, right=True).flatten()
                    sums[0].index_add_(0, buckets, scores.losses.flatten().double())
                    sums[1].index_add_(0, buckets, (batch.labels != IGNORED_LABEL).flatten().double())
                on_progress(done, len(loader))
        nats, labels = mesh.sum_over_data(mesh.pp.sum(sums)).cpu()
        names = [
            f"{first}-{end - 1}" for first, end in zip(edges, [*edges[1:], config.data.sequence_length], strict=True)
        ]
        losses = {name: float(n / c) for name, n, c in zip(names, nats, labels, strict=True) if c}
        metrics = {"loss": float(nats.sum() / labels.sum().clamp(min=1)), **losses}
        return TaskResult(
            metrics={name: Metric(value, 0.0) for name, value in metrics.items()},
            num_questions=int(labels.sum()),
            num_questions_in_file=int(labels.sum()),
            num_requests=int(labels.sum()),
            num_truncated=0,
            method="packed",
            seconds=time.perf_counter() - started,
            details={"first_places": edges, "labels": labels.long().tolist()},
        )


def bucket_edges(sequence_length: int) -> list[int]:
    """First place of each bucket: 0, 64, 128, 256, ... below `sequence_length`."""
    edges, edge = [0], FIRST_BUCKET
    while edge < sequence_length:
        edges.append(edge)
        edge *= 2
    return edges


def places_in_documents(document_ids: Tensor) -> Tensor:
    """[B, T] number of earlier tokens of the same document, of document_ids [B, T], which never fall."""
    index = torch.arange(document_ids.shape[1]).expand_as(document_ids)
    starts = torch.ones_like(document_ids, dtype=torch.bool)
    starts[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    return index - index.where(starts, 0).cummax(1).values
