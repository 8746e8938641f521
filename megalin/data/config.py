"""The table [data] of a run: its shards, their sampling weights and order, and how they are cut into samples."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal, Self

import pydantic

from megalin.config import REFUSED, REPORTED, SILENT, Change, Config, suggest

SplitName = Literal["train", "validation", "test"]
SPLITS: tuple[SplitName, ...] = ("train", "validation", "test")
ONLY_SOURCE = "train"
"""Name of the source made of `data.train`."""
DEFAULT_CACHE = "cache"

FRAME_TOKENS = 3
"""[CLS] before segment A, [SEP] after it and after segment B."""
SMALLEST_LENGTH = FRAME_TOKENS + 3
"""Least tokens of a sample: with three of text, the equal pieces of a document have at least two tokens."""

TokenId = Annotated[int, pydantic.Field(ge=0)]
SamplingWeight = Annotated[float, pydantic.Field(ge=0, allow_inf_nan=False)]


class SourceConfig(Config):
    """Shards of one kind of text, and their sampling weight."""

    on_change: ClassVar[Change | None] = "reported"
    name: str = pydantic.Field(pattern=r"^[A-Za-z0-9_.-]+$")
    """Name of the source in phases and reports; it is part of the key of its sample order."""
    paths: Annotated[list[str], pydantic.Field(min_length=1), SILENT]
    """Prefixes of its shards (path without .bin and .idx), read in this order as one sequence of tokens."""
    weight: SamplingWeight | None = None
    """Sampling weight, in any unit. Without weights, each source is sampled in proportion to its size. 0: not sampled
    until a phase gives it a weight."""


class PhaseConfig(Config):
    """Sampling weights from a step on; each source continues at its own position."""

    on_change: ClassVar[Change | None] = "reported"
    from_step: int = pydantic.Field(ge=1)
    """Finished steps after which these weights apply, with the batches that rollbacks left out; rising from phase to
    phase."""
    weights: dict[str, SamplingWeight]
    """Weight of each source by its name, in any unit; a source that is left out is not sampled."""


class MaskingConfig(Config):
    """Samples of masked tokens and sentence pairs: [CLS] A [SEP] B [SEP] and padding."""

    on_change: ClassVar[Change | None] = "refused"
    cls_token: TokenId | str = "[CLS]"
    """First token of a sample: id, or name in the tokenizer."""
    sep_token: TokenId | str = "[SEP]"
    """Token after each segment, likewise."""
    mask_token: TokenId | str = "[MASK]"
    """Token in place of a masked one, likewise."""
    pad_token: TokenId | str = "[PAD]"
    """Token after the end of a sample, likewise."""
    predicted_share: float = pydantic.Field(default=0.15, gt=0, le=1)
    """Fraction of a sample's text tokens that are predicted; at least one token, at most max_predictions."""
    max_predictions: int = pydantic.Field(ge=1)
    """Most predictions per sample; memory and compute of the head are those of this number in every sample."""
    mask_share: float = pydantic.Field(default=0.8, ge=0, le=1)
    """Probability that a predicted token is replaced by the mask token."""
    random_share: float = pydantic.Field(default=0.1, ge=0, le=1)
    """Probability that it is replaced by a random token instead; otherwise it stays unchanged."""
    other_document_share: float = pydantic.Field(default=0.5, ge=0, le=1)
    """Probability that segment B comes from another document (next-sentence label 1) and does not follow A (0)."""
    copies: int = pydantic.Field(default=10, ge=1)
    """Samples of each piece of text per epoch, each cut and masked differently; one in validation."""

    @pydantic.model_validator(mode="after")
    def _check_shares(self) -> Self:
        if self.mask_share + self.random_share > 1.0:
            raise ValueError(
                f"mask_share = {self.mask_share} and random_share = {self.random_share} add up to more than 1; "
                "lower one of them"
            )
        return self


class ClassificationConfig(Config):
    """Samples with a class, for encoders that classify: a document is a sample, and its last token the class."""

    on_change: ClassVar[Change | None] = "refused"
    first_class_id: int = pydantic.Field(ge=0)
    """Token id of class 0; the ids of the other classes follow it."""
    num_classes: int = pydantic.Field(ge=2)
    """Number of classes; that of the model."""
    separator_tokens: int = pydantic.Field(default=0, ge=0)
    """Tokens before the class that belong neither to it nor to the sample: 1 for the "=" of generated tasks."""


class DataConfig(Config):
    """Tokens that a run reads, and how they are cut into samples."""

    on_change: ClassVar[Change | None] = "silent"
    train: list[str] = pydantic.Field(default_factory=list)
    """Prefixes of the training shards (path without .bin and .idx), read in this order as one sequence of tokens;
    empty with `sources`. Phases name them as the source "train"."""
    sources: list[SourceConfig] = pydantic.Field(default_factory=list)
    """Training shards in groups, each with a sampling weight."""
    phases: Annotated[list[PhaseConfig], REPORTED] = pydantic.Field(default_factory=list)
    """Changes of the sampling weights during the run."""
    validation: Annotated[list[str], REPORTED] = pydantic.Field(default_factory=list)
    """Prefixes of the validation shards; may be empty."""
    test: list[str] = pydantic.Field(default_factory=list)
    """Prefixes of the test shards, which `megalin eval --split test` reads; may be empty."""
    validation_fraction: Annotated[float, pydantic.Field(ge=0.0, lt=1.0), REPORTED] = 0.0
    """Fraction of each training shard's sequences, at its end, that is held out; only if `validation` is empty."""
    split: Annotated[list[SamplingWeight] | None, REPORTED] = pydantic.Field(default=None, min_length=3, max_length=3)
    """Fractions of each training shard's sequences for training, validation and test, in this order and in any unit,
    as Megatron-LM's --split 969,30,1; left out: all of each shard but `validation_fraction` trains."""
    sequence_length: Annotated[int, pydantic.Field(ge=1), REFUSED]
    """T, tokens of a sample that the model reads; a sample holds T + 1 ids, the last being the first of the next."""
    order: Annotated[Literal["megalin", "megatron"], REFUSED] = "megalin"
    """Order of the training samples: a function of (seed, step) that a longer run does not change, or Megatron-LM's
    order for a run of `train.steps`, sample by sample."""
    cache: str = DEFAULT_CACHE
    """With order = "megatron": folder of its index files; a relative path is inside the run folder."""
    packing: Annotated[Literal["concatenate", "first_fit", "best_fit"], REFUSED] = "concatenate"
    """Packing of sequences: concatenated and cut every T tokens, or whole ones packed into samples of T, each in the
    first sample with room for it or in the fullest of these; then only those longer than T are cut."""
    tokenizer: str | None = None
    """Tokenizer that made the shards: the path of a tokenizer.json, of its folder, of a SentencePiece .model or of a
    .tiktoken file, or "bytes"; generation and bits per byte need it."""
    eod_token: Annotated[TokenId | Annotated[str, pydantic.Field(min_length=1)] | None, REPORTED] = None
    """Token that ends a document: text or id; left out: eos_token of the tokenizer's folder, or else the end of a
    published vocabulary, or <|endoftext|>."""
    special_tokens: Annotated[bool | None, REPORTED] = None
    """Put the tokenizer's special ids, such as BOS, around prompts, choice tasks and texts of lm-eval, as in shards
    made with --special-tokens; left out: not around prompts, around the others where a tokenizer.json adds them."""
    preparation: list[str] = pydantic.Field(default_factory=list)
    """Commands that make the shards and the tokenizer, in order; the error about missing files prints them."""
    isolate_documents: Annotated[bool, REFUSED] = True
    """Isolate documents in state, attention and loss; false treats a sample as one document."""
    masking: Annotated[MaskingConfig | None, REFUSED] = None
    """Samples of masked tokens and sentence pairs, for encoders that pretrain; left out: other samples."""
    classification: Annotated[ClassificationConfig | None, REFUSED] = None
    """Samples of a document and its class, for encoders that classify; left out: other samples. Without masking and
    classification: samples of next tokens."""
    verify: Literal["full", "sample", "off"] = "sample"
    """Verification of the shards at the start of a run: all bytes of each .idx and label mask, of each .bin all blocks
    of 16 MiB ("full") or up to 64 chosen by the file's name ("sample": at most 10 seconds and 16 GiB a host) are read
    again and compared with the digests in the shard's manifest, in the run folder and in the checkpoint. While the run
    reads them, a thread compares the blocks one by one, and every write to an open file ends it unless the bytes are
    the same. "off": nothing is hashed, and every such write ends the run."""
    workers: int = pydantic.Field(default=2, ge=1, le=1024)
    """Threads per rank that read samples ahead."""
    read_ahead_steps: int = pydantic.Field(default=1, ge=1, le=1024)
    """Number of steps whose samples are read in advance."""

    @pydantic.model_validator(mode="after")
    def _check(self) -> Self:
        problems = [*self._source_problems(), *self._phase_problems(), *self._split_problems(), *self._order_problems()]
        if self.masking is not None:
            problems += self._masking_problems(self.masking)
        if self.classification is not None:
            problems += self._classification_problems()
        if problems:
            raise ValueError("\n".join(problems))
        return self

    def training_sources(self) -> list[SourceConfig]:
        """Sources of the training split; `train` is one source."""
        return self.sources or [SourceConfig(name=ONLY_SOURCE, paths=self.train)]

    def training_paths(self) -> list[str]:
        """Prefixes of all training shards."""
        return [path for source in self.training_sources() for path in source.paths]

    def paths(self, split: SplitName) -> list[str]:
        """Prefixes of a split's shards: its own, or the training shards that contain it."""
        own = {"train": [], "validation": self.validation, "test": self.test}[split]
        return own or self.training_paths()

    def has(self, split: SplitName) -> bool:
        """True where the run has this split."""
        if self.split is not None:
            return self.split[SPLITS.index(split)] > 0
        held_out = {"train": True, "validation": self.validation_fraction > 0, "test": False}[split]
        return held_out or bool({"train": [], "validation": self.validation, "test": self.test}[split])

    def sequences(self, split: SplitName, num_sequences: int) -> tuple[int, int]:
        """Range [first, end) of the sequences that a split reads of each shard of `paths(split)`."""
        if self.split is not None:
            # As Megatron-LM places the boundaries: sums of normalised fractions, times N, rounded.
            total = sum(self.split)
            ends = list(itertools.accumulate((weight / total for weight in self.split), initial=0.0))
            first, end = ends[SPLITS.index(split)], ends[SPLITS.index(split) + 1]
            return round(first * num_sequences), round(end * num_sequences)
        if self.validation or split == "test":
            return 0, num_sequences
        boundary = num_sequences - int(num_sequences * self.validation_fraction)
        return (0, boundary) if split == "train" else (boundary, num_sequences)

    def held_out(self) -> str:
        """Config key that sets the boundaries of the splits in training shards, for messages; empty where none does."""
        if self.split is not None:
            return f" (split = {self.split})"
        return "" if self.validation else f" (validation_fraction = {self.validation_fraction})"

    def _source_problems(self) -> Iterator[str]:
        if self.train and self.sources:
            yield "train has no effect with sources; list its shards in a source"
        if not (self.train or self.sources):
            yield "train = []: no training shards; list at least one there, or in sources"
        names = [source.name for source in self.sources]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            yield f"sources has the name {twice} more than once; give each source a different name"
        weights = [source.weight for source in self.sources if source.weight != 0]
        if self.sources and not weights:
            yield "sources.weight = 0 everywhere; give at least one source a positive weight"
        if None in weights and any(weights):
            unweighted = next(source.name for source in self.sources if source.weight is None)
            yield f"sources: {unweighted} has no weight, but others have; give a weight to every source or to none"
        paths = [*self.train, *(path for source in self.sources for path in source.paths)]
        # Other spellings of a path count; links do not, because configs are read where the shards are not.
        taken: dict[str, str] = {}
        repeated: list[str] = []
        for path in paths:
            place = os.path.abspath(path)
            if place in taken:
                repeated.append(path)
            else:
                taken[place] = path
        if repeated:
            first, again = taken[os.path.abspath(repeated[0])], repeated[0]
            field = "train" if self.train else "sources"
            also = "" if again == first else f", also as {again}"
            yield f"{field} lists the shard {first} more than once{also}; list each shard once"
        for split in ("validation", "test"):
            if shared := sorted(path for path in getattr(self, split) if os.path.abspath(path) in taken):
                yield f"{split} lists the training shard {shared[0]}; a held-out split needs other data"

    def _phase_problems(self) -> Iterator[str]:
        names = [source.name for source in self.sources] or [ONLY_SOURCE]
        for number, phase in enumerate(self.phases):
            field = f"phases.{number}"
            if number and phase.from_step <= self.phases[number - 1].from_step:
                before = self.phases[number - 1].from_step
                yield f"{field}.from_step = {phase.from_step} must be above {before}, that of the previous phase"
            for name in phase.weights:
                if name not in names:
                    yield f"{field}.weights.{name}: no such source; {suggest(name, names)}"
            if not any(phase.weights.values()):
                yield f"{field}.weights = {phase.weights}: give at least one source a positive weight"

    def _split_problems(self) -> Iterator[str]:
        if self.validation and self.validation_fraction:
            fraction = self.validation_fraction
            yield f"validation_fraction = {fraction} has no effect with validation; remove one of them"
        if self.split is None:
            return
        if not self.split[0]:
            yield f"split = {self.split} leaves nothing to train on; make its first number positive"
        for field in ("validation", "test", "validation_fraction"):
            if getattr(self, field):
                yield f"{field} has no effect with split; remove one of them"

    def _order_problems(self) -> Iterator[str]:
        if self.order == "megatron":
            if self.phases:
                yield 'phases: not supported with order = "megatron"; remove them, or use order = "megalin"'
            if self.packing != "concatenate":
                yield f'packing = "{self.packing}": order = "megatron" only supports packing = "concatenate"'
            if self.masking is not None:
                yield 'masking: order = "megatron" gives next-token samples only; use order = "megalin"'
            for source in self.sources:
                if source.weight == 0:
                    yield f'sources: {source.name} has weight 0; order = "megatron" reads every source: remove it'
                if len(source.paths) > 1:
                    count = len(source.paths)
                    yield f'sources: {source.name} has {count} shards; order = "megatron" takes one shard per source'
        elif self.cache != DEFAULT_CACHE:
            yield f'cache = "{self.cache}" has no effect with order = "megalin", which stores nothing; remove it'
        if self.packing != "concatenate":
            if not self.isolate_documents:
                yield f'isolate_documents = false: packing = "{self.packing}" keeps documents apart; remove one of them'
            if self.masking is not None:
                yield f'packing = "{self.packing}" has no effect with masking; remove it'

    def _classification_problems(self) -> Iterator[str]:
        if self.masking is not None:
            yield "classification and masking make different samples; remove one of them"
        if self.order == "megatron":
            yield 'classification: order = "megatron" gives next-token samples only; use order = "megalin"'
        if self.packing != "concatenate":
            yield f'packing = "{self.packing}" has no effect with classification: a document is a sample; remove it'
        if not self.isolate_documents:
            yield "isolate_documents = false has no effect with classification; remove it"

    def _masking_problems(self, masking: MaskingConfig) -> Iterator[str]:
        if self.sequence_length < SMALLEST_LENGTH:
            yield (
                f"sequence_length = {self.sequence_length} has no room for [CLS], two [SEP] and text in both segments; "
                f"use at least {SMALLEST_LENGTH}"
            )
        elif masking.max_predictions > self.sequence_length - FRAME_TOKENS:
            yield (
                f"masking.max_predictions = {masking.max_predictions} is more than the "
                f"{self.sequence_length - FRAME_TOKENS} tokens of text in a sample; lower it"
            )
        if not self.isolate_documents:
            yield "isolate_documents = false has no effect with masking; remove it"
