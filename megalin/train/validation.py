"""Evaluation on a dataset split: loss and bits per byte of a decoder, losses and accuracies of an encoder."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from megalin.data.batch import AnyBatch, Batch, EncoderBatch, batch_to, split_tokens
from megalin.data.tokenizers.tokenizer import Tokenizer
from megalin.errors import DataError
from megalin.model.encoder import Encoder
from megalin.model.language_model import LanguageModel
from megalin.parallel.cross_entropy import IGNORED_LABEL, vocab_parallel_argmax
from megalin.parallel.data_parallel import reshard
from megalin.parallel.mesh import Mesh
from megalin.train.build import TrainedModel
from megalin.train.pipeline_model import Pipeline

_log = logging.getLogger(__name__)


class Evaluation(NamedTuple):
    """Results of a decoder on all valid labels of a split, equal on every rank."""

    loss: float
    """Mean nats a token."""
    perplexity: float
    """exp(loss)."""
    bits_per_byte: float | None
    """Total loss in bits over the UTF-8 bytes that the labels decode to; None without a tokenizer."""
    unigram_entropy: float
    """Entropy in nats of the labels' own frequencies: the loss of the best model without context."""
    tokens: int
    """Number of labels."""
    bits_per_normalized_byte: float | None = None
    """The same over the bytes of a text that the tokenizer has altered, in place of bits_per_byte; shards hold no
    other."""
    altered: str = ""
    """The parts of the tokenizer that do so."""

    def values(self) -> dict[str, Any]:
        """The fields as JSON, without those of an altered text where there is none."""
        altered = () if self.altered else ("bits_per_normalized_byte", "altered")
        return {name: value for name, value in self._asdict().items() if name not in altered}

    def metrics(self) -> dict[str, float | int]:
        """Values for a line of metrics.jsonl."""
        values: dict[str, float | int] = {"evaluation_loss": self.loss, "evaluation_tokens": self.tokens}
        bits = {name: getattr(self, name) for name in ("bits_per_byte", "bits_per_normalized_byte")}
        return values | {f"evaluation_{name}": value for name, value in bits.items() if value is not None}

    def report_lines(self) -> list[str]:
        """The report for people, line by line."""
        bits = "no tokenizer" if self.bits_per_byte is None else f"{self.bits_per_byte:.4f}"
        if self.bits_per_normalized_byte is not None:
            bits = f"{self.bits_per_normalized_byte:.4f} of the text as the tokenizer alters it ({self.altered})"
        return [
            f"loss            {self.loss:.4f} nats a token over {self.tokens:,} tokens",
            f"unigram entropy {self.unigram_entropy:.4f} nats a token, of the same tokens",
            f"perplexity      {self.perplexity:.2f}",
            f"bits per byte   {bits}",
        ]

    def summary(self) -> str:
        """The report in one line."""
        bits = "" if self.bits_per_byte is None else f", {self.bits_per_byte:.4f} bits per byte"
        if self.bits_per_normalized_byte is not None:
            bits = f", {self.bits_per_normalized_byte:.4f} bits per normalized byte"
        return (
            f"loss {self.loss:.4f} nats a token, perplexity {self.perplexity:.2f}{bits} "
            f"(unigram entropy {self.unigram_entropy:.4f})"
        )


class EncoderEvaluation(NamedTuple):
    """Results of a pretraining encoder on all valid labels of a split, equal on every rank."""

    loss: float
    """mlm_loss + nsp_loss."""
    mlm_loss: float
    """Mean nats a masked token."""
    mlm_accuracy: float
    """Fraction of the masked tokens whose most likely id is the right one."""
    nsp_loss: float
    """Mean nats a sentence pair."""
    nsp_accuracy: float
    """Fraction of the pairs that are classified correctly."""
    unigram_entropy: float
    """Entropy in nats of the masked tokens' own frequencies: the mlm_loss of the best model without context."""
    tokens: int
    """Number of masked tokens."""
    sequences: int
    """Number of pairs."""

    def values(self) -> dict[str, Any]:
        """The fields as JSON."""
        return self._asdict()

    def metrics(self) -> dict[str, float | int]:
        """Values for a line of metrics.jsonl."""
        return {f"evaluation_{name}": value for name, value in self._asdict().items() if name != "unigram_entropy"}

    def report_lines(self) -> list[str]:
        """The report for people, line by line."""
        return [
            f"MLM loss        {self.mlm_loss:.4f} nats a masked token over {self.tokens:,} of them",
            f"MLM accuracy    {self.mlm_accuracy:.2%}",
            f"unigram entropy {self.unigram_entropy:.4f} nats a token, of the same tokens",
            f"NSP loss        {self.nsp_loss:.4f} nats a pair over {self.sequences:,} pairs",
            f"NSP accuracy    {self.nsp_accuracy:.2%}",
        ]

    def summary(self) -> str:
        """The report in one line."""
        return (
            f"MLM loss {self.mlm_loss:.4f} nats a masked token (unigram entropy {self.unigram_entropy:.4f}), accuracy "
            f"{self.mlm_accuracy:.2%}; NSP loss {self.nsp_loss:.4f} nats a pair, accuracy {self.nsp_accuracy:.2%}"
        )


class ClassEvaluation(NamedTuple):
    """Results of an encoder that classifies, on all sequences of a split, equal on every rank."""

    loss: float
    """Mean nats a sequence."""
    accuracy: float
    """Fraction of the sequences whose most likely class is the right one."""
    majority: float
    """Fraction of the most frequent class: the accuracy of the best model that reads nothing."""
    class_entropy: float
    """Entropy in nats of the classes' own frequencies: the loss of that model."""
    sequences: int
    """Number of sequences."""

    def values(self) -> dict[str, Any]:
        """The fields as JSON."""
        return self._asdict()

    def metrics(self) -> dict[str, float | int]:
        """Values for a line of metrics.jsonl."""
        names = ("loss", "accuracy", "sequences")
        return {f"evaluation_{name}": value for name, value in self._asdict().items() if name in names}

    def report_lines(self) -> list[str]:
        """The report for people, line by line."""
        return [
            f"loss          {self.loss:.4f} nats a sequence over {self.sequences:,} sequences",
            f"class entropy {self.class_entropy:.4f} nats, of the same sequences",
            f"accuracy      {self.accuracy:.2%}",
            f"majority      {self.majority:.2%} of the most frequent class",
        ]

    def summary(self) -> str:
        """The report in one line."""
        return (
            f"loss {self.loss:.4f} nats a sequence (class entropy {self.class_entropy:.4f}), accuracy "
            f"{self.accuracy:.2%} (most frequent class {self.majority:.2%})"
        )


AnyEvaluation = Evaluation | EncoderEvaluation | ClassEvaluation


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Context in which a model is in eval mode; afterwards in its mode before, with sharded weights."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        reshard(model)
        model.train(was_training)


class TokenBytes(NamedTuple):
    """Bytes of the ids of a tokenizer."""

    counts: Tensor
    """[vocabulary] int64, UTF-8 bytes that each id decodes to."""
    altered: str = ""
    """Parts of the tokenizer that change a text before it has ids (`Tokenizer.altered`)."""


def bytes_per_token(tokenizer: Tokenizer | None) -> TokenBytes | None:
    """Bytes that each id decodes to; None without a tokenizer.

    Also None, with a warning, for a tokenizer whose ids have no fixed number of bytes: bits per byte are then left out.
    """
    if tokenizer is None:
        return None
    try:
        return TokenBytes(torch.from_numpy(tokenizer.token_bytes()), tokenizer.altered)
    except DataError as error:
        _log.warning("no bits per byte: %s", error)
        return None


@torch.no_grad()
def evaluate(
    model: TrainedModel, batches: Iterable[AnyBatch], mesh: Mesh, *, token_bytes: TokenBytes | None = None
) -> AnyEvaluation:
    """Evaluates every batch of this rank; all ranks call it with the same number of batches.

    Args:
        batches: full sequences of a decoder, or batches of an encoder.
        token_bytes: bytes that each id decodes to; only decoders use it.
    """
    with evaluating(model):
        if isinstance(model, Encoder):
            encode = _evaluate_encoder if model.config.num_classes is None else _evaluate_classifier
            return encode(model, cast(Iterable[EncoderBatch], batches), mesh)
        return _evaluate_decoder(model, cast(Iterable[Batch], batches), mesh, token_bytes)


def _evaluate_decoder(
    model: LanguageModel | Pipeline, batches: Iterable[Batch], mesh: Mesh, token_bytes: TokenBytes | None
) -> Evaluation:
    vocab_size = model.config.vocab_size
    total = torch.zeros((), dtype=torch.float64, device=mesh.device)
    counts = torch.zeros(vocab_size, dtype=torch.int64, device=mesh.device)
    for batch in batches:
        batch = batch_to(split_tokens(batch, mesh.cp), mesh.device)
        total += model.loss_sums(batch.inputs()).sum()
        counts += _count(batch.labels, vocab_size)
    nats = mesh.sum_over_data(mesh.pp.sum(total)).item()
    counts = mesh.sum_over_data(counts).cpu()
    tokens = int(counts.sum())
    loss = nats / max(tokens, 1)
    found = Evaluation(loss, math.exp(min(loss, 700.0)), None, _entropy(counts), tokens)
    if token_bytes is None:
        return found
    of_ids, altered = token_bytes
    num_bytes = int((counts[: len(of_ids)] * of_ids[:vocab_size]).sum())
    bits = nats / math.log(2) / max(num_bytes, 1)
    if altered:
        return found._replace(bits_per_normalized_byte=bits, altered=altered)
    return found._replace(bits_per_byte=bits)


def _evaluate_encoder(model: Encoder, batches: Iterable[EncoderBatch], mesh: Mesh) -> EncoderEvaluation:
    vocab_size, device = model.config.vocab_size, mesh.device
    sums = torch.zeros(2, dtype=torch.float64, device=device)  # losses: masked tokens, pairs
    right = torch.zeros(2, dtype=torch.int64, device=device)
    sequences = torch.zeros((), dtype=torch.int64, device=device)
    counts = torch.zeros(vocab_size, dtype=torch.int64, device=device)
    for batch in batches:
        batch = batch_to(split_tokens(batch, mesh.cp), device)
        output = model(**batch.inputs())
        assert output.masked_losses is not None
        assert output.masked_logits is not None
        assert output.sequence_losses is not None
        losses = (output.masked_losses, output.sequence_losses)
        sums += torch.stack([each.sum(dtype=torch.float64) for each in losses])
        likeliest = vocab_parallel_argmax(output.masked_logits, mesh.tp.axis)
        right += torch.stack(
            [
                (likeliest == batch.masked_labels).sum(),
                (output.sequence_logits.argmax(-1) == batch.sequence_labels).sum(),
            ]
        )
        sequences += (batch.sequence_labels != IGNORED_LABEL).sum()
        counts += _count(batch.masked_labels, vocab_size)
    mlm_nats, nsp_nats = mesh.sum_over_data(sums).tolist()
    mlm_right, nsp_right = mesh.sum_over_data(right).tolist()
    pairs = int(mesh.sum_over_data(sequences))
    counts = mesh.sum_over_data(counts).cpu()
    tokens = int(counts.sum())
    mlm_loss, nsp_loss = mlm_nats / max(tokens, 1), nsp_nats / max(pairs, 1)
    return EncoderEvaluation(
        loss=mlm_loss + nsp_loss,
        mlm_loss=mlm_loss,
        mlm_accuracy=mlm_right / max(tokens, 1),
        nsp_loss=nsp_loss,
        nsp_accuracy=nsp_right / max(pairs, 1),
        unigram_entropy=_entropy(counts),
        tokens=tokens,
        sequences=pairs,
    )


def _evaluate_classifier(model: Encoder, batches: Iterable[EncoderBatch], mesh: Mesh) -> ClassEvaluation:
    num_classes, device = model.config.num_classes, mesh.device
    assert num_classes is not None
    nats = torch.zeros((), dtype=torch.float64, device=device)
    right = torch.zeros((), dtype=torch.int64, device=device)
    counts = torch.zeros(num_classes, dtype=torch.int64, device=device)
    for batch in batches:
        batch = batch_to(split_tokens(batch, mesh.cp), device)  # the first rank of cp has the labels
        output = model(**batch.inputs())
        assert output.sequence_losses is not None
        nats += output.sequence_losses.sum(dtype=torch.float64)
        right += (output.sequence_logits.argmax(-1) == batch.sequence_labels).sum()
        counts += _count(batch.sequence_labels, num_classes)
    reshard(model)
    total_nats, total_right = mesh.sum_over_data(nats).item(), int(mesh.sum_over_data(right))
    counts = mesh.sum_over_data(counts).cpu()
    sequences = max(int(counts.sum()), 1)
    return ClassEvaluation(
        loss=total_nats / sequences,
        accuracy=total_right / sequences,
        majority=int(counts.max()) / sequences,
        class_entropy=_entropy(counts),
        sequences=int(counts.sum()),
    )


def _count(labels: Tensor, vocab_size: int) -> Tensor:
    """Number of valid labels of each id or class, [vocabulary] int64."""
    return torch.bincount(labels[labels != IGNORED_LABEL], minlength=vocab_size)


def _entropy(counts: Tensor) -> float:
    """Entropy in nats of the distribution of the counts [vocabulary]."""
    probabilities = counts[counts > 0].double() / max(int(counts.sum()), 1)
    return -(probabilities * probabilities.log()).sum().item()
