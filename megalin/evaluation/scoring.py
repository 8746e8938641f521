"""Perplexity of documents under a trained model, for cleaning a corpus with a model trained on it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from megalin.data.corpus.batches import batches
from megalin.data.corpus.documents import Reader
from megalin.data.corpus.parts import CorpusPart, CorpusProgress, PartSubset, ReportProgress, Run, run_parts
from megalin.data.corpus.score_selection import scores_path
from megalin.data.tokenizers.tokenizer import Tokenizer
from megalin.errors import ConfigError
from megalin.evaluation.forward_groups import forward_groups
from megalin.files import open_temporary, publish, storage_errors
from megalin.model.language_model import LanguageModel
from megalin.parallel.cross_entropy import IGNORED_LABEL

_PIECE_TOKENS = 4096  # per forward of a document; the model's state is passed to the next piece


class ScoringModel(NamedTuple):
    """The scoring model, unsharded on one device, and its tokenizer. It computes in the dtype of its weights; losses
    from the logits, and states, are at least fp32."""

    model: LanguageModel
    tokenizer: Tokenizer


class _Job(NamedTuple):
    scorer: ScoringModel
    key: str
    limit_bytes: int


def score_corpus(
    scorer: ScoringModel,
    parts: Sequence[CorpusPart],
    folder: Path,
    *,
    json_key: str,
    limit_bytes: int,
    resume: bool,
    subset: PartSubset | None,
    on_progress: Callable[[CorpusProgress], None] = lambda _: None,
) -> None:
    """Scores this process's parts of the corpus and writes them into `folder`; the number of processes has no effect.

    Raises:
        ConfigError: the tokenizer has more ids than the model.
        DataError: a file cannot be read, or `folder` has parts of another corpus or model.
        StorageError: the scores cannot be written.
    """
    known, needed = scorer.model.config.vocab_size, scorer.tokenizer.vocab_size
    if needed > known:
        raise ConfigError(f"the tokenizer has {needed} ids, but the model only {known}; use the run's own tokenizer")
    settings = {
        "key": json_key,
        "limit_bytes": limit_bytes,
        "tokenizer": scorer.tokenizer.digest,
        "dtype": str(scorer.model.embedding.weight.dtype).removeprefix("torch."),
        "weights": _digest(scorer.model),
    }
    run_parts(
        _score_part, _Job(scorer, json_key, limit_bytes), parts, Run(folder, settings, 1, resume, subset, on_progress)
    )


def _digest(model: LanguageModel) -> str:
    """sha256 of the weights, in hex."""
    state = hashlib.sha256()
    for name, parameter in model.named_parameters():
        state.update(name.encode())
        state.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().data)
    return state.hexdigest()


def _score_part(job: _Job, part: CorpusPart, folder: Path, report: ReportProgress) -> Mapping[str, Any]:
    path, documents = scores_path(folder, part.number), 0
    with open_temporary(path) as file:
        reader = Reader(part.span, [job.key], limit_bytes=job.limit_bytes)
        for batch in batches(reader):
            scores = score_texts(job.scorer, [document.texts[0] for document in batch.documents])
            with storage_errors(path):
                file.write(scores.tobytes())
            documents += len(batch.documents)
            report(
                CorpusProgress(len(batch.documents), int(scores[:, 1].sum()), batch.read_bytes, len(batch.bad_lines))
            )
        publish(file, path)
    return {"documents": documents}


@torch.no_grad()
def score_texts(scorer: ScoringModel, texts: Sequence[str]) -> npt.NDArray[np.float64]:
    """[n, 2] float64: -sum_t ln p(x_t | end of document, x_1 .. x_(t-1)) in nats, and the number of tokens x.

    Texts may have any length: they run through the model in pieces, and the state is passed from piece to piece.
    """
    encoded = scorer.tokenizer.encode_batch(texts)
    scores = np.array([(0.0, len(ids)) for ids in encoded], np.float64).reshape(-1, 2)
    order = sorted((k for k, ids in enumerate(encoded) if ids), key=lambda k: len(encoded[k]))
    in_a_forward = [min(len(encoded[k]), _PIECE_TOKENS) for k in order]
    for part in forward_groups(in_a_forward, scorer.model.state_bytes()):
        group = [order[index] for index in part]
        scores[group, 0] = _losses(scorer, [encoded[k] for k in group])
    return scores


def _losses(scorer: ScoringModel, encoded: Sequence[list[int]]) -> npt.NDArray[np.float64]:
    """[B] summed losses of the texts, in nats; the host waits for the device once."""
    model = scorer.model
    length = max(map(len, encoded))
    labels = torch.full((len(encoded), length), IGNORED_LABEL)  # [B, T]
    for row, ids in zip(labels, encoded, strict=True):
        row[: len(ids)] = torch.tensor(ids)
    inputs = torch.cat((torch.full((len(encoded), 1), scorer.tokenizer.eod_id), labels[:, :-1].clamp(min=0)), dim=1)
    device = model.embedding.weight.device
    state, sums = model.initial_state(len(encoded)), torch.zeros(len(encoded), dtype=torch.float64, device=device)
    for start in range(0, length, _PIECE_TOKENS):
        piece = slice(start, start + _PIECE_TOKENS)
        output = model(inputs[:, piece].to(device), labels=labels[:, piece].to(device), state=state)
        assert output.token_losses is not None
        assert output.state is not None
        sums += output.token_losses.sum(1, dtype=torch.float64)
        state = output.state
    return sums.cpu().numpy()
