"""The table [data] of a run: which shards it reads, in which shares and order, and how they are cut into samples."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Annotated, Literal, Self

import pydantic

from megalin.config import Config, suggest
from megalin.data.masking import FRAME_TOKENS, SMALLEST_LENGTH, MaskingConfig

SplitName = Literal["train", "validation", "test"]
SPLITS: tuple[SplitName, ...] = ("train", "validation", "test")
ONLY_SOURCE = "train"
"""Name of the source that `data.train` is."""
DEFAULT_CACHE = "cache"

SamplingWeight = Annotated[float, pydantic.Field(ge=0, allow_inf_nan=False)]


class SourceConfig(Config):
    """Shards of one kind of text, and their share of the training samples."""

    name: str = pydantic.Field(pattern=r"^[A-Za-z0-9_.-]+$")
    """Name of the source in phases and reports; its own order of samples is keyed by it."""
    paths: Annotated[list[str], pydantic.Field(min_length=1)]
    """Prefixes of its shards (path without .bin and .idx), read as one stream in this order."""
    weight: SamplingWeight | None = None
    """Its share of the samples, in any unit; left out everywhere: sources have shares as they have samples. 0: none
    until a phase says otherwise."""


class PhaseConfig(Config):
    """Other shares from a step on; each source goes on where it was."""

    from_step: int = pydantic.Field(ge=1)
    """Finished steps after which the shares change; rising from phase to phase."""
    weights: dict[str, SamplingWeight]
    """Share of each source by its name, in any unit; a source that is not named gives no sample."""


class DataConfig(Config):
    """Which tokens a run reads, and how they are cut into samples."""

    train: list[str] = pydantic.Field(default_factory=list)
    """Prefixes of the training shards (path without .bin and .idx), read as one stream in this order; or empty beside
    `sources`. To phases they are a source with the name "train"."""
    sources: list[SourceConfig] = pydantic.Field(default_factory=list)
    """Training shards in groups, each with its share of the samples."""
    phases: list[PhaseConfig] = pydantic.Field(default_factory=list)
    """Changes of the shares in mid-run."""
    validation: list[str] = pydantic.Field(default_factory=list)
    """Prefixes of the validation shards; may be empty."""
    test: list[str] = pydantic.Field(default_factory=list)
    """Prefixes of the test shards, which `megalin eval --split test` reads; may be empty."""
    validation_fraction: Annotated[float, pydantic.Field(ge=0.0, lt=1.0)] = 0.0
    """Where `validation` is empty: share of the sequences at the end of each training shard that is held out."""
    split: Annotated[list[SamplingWeight], pydantic.Field(min_length=3, max_length=3)] | None = None
    """Shares of training, validation and test in the sequences of each training shard, in this order and in any unit,
    as Megatron-LM's --split 969,30,1; left out: all of each shard but `validation_fraction`."""
    sequence_length: Annotated[int, pydantic.Field(ge=1)]
    """T, tokens a sample that the model reads; a sample holds T + 1 ids and shares the last one with the next."""
    order: Literal["megalin", "megatron"] = "megalin"
    """Order of the training samples: a function of (seed, step) that a longer run does not change, or that of
    Megatron-LM for a run of `train.steps`, sample by sample."""
    cache: str = DEFAULT_CACHE
    """With order = "megatron": folder of its index files; a relative one lies in the run folder."""
    packing: Literal["concatenate", "first_fit", "best_fit"] = "concatenate"
    """How sequences fill samples: laid end to end and cut every T tokens, or whole ones packed into rows of T, each in
    the first row with room for it or in the one with the least; then only those longer than T are cut."""
    tokenizer: str | None = None
    """Path of the tokenizer.json that made the shards, or "bytes"; generation and bits per byte need it."""
    isolate_documents: bool = True
    """Keep documents apart in state, attention and loss; false lets a sample run on over their borders."""
    masking: MaskingConfig | None = None
    """Samples of masked tokens and sentence pairs, which an encoder trains on; left out: of next tokens."""
    workers: int = pydantic.Field(default=2, ge=1)
    """Threads of a rank that read samples ahead."""
    read_ahead_steps: int = pydantic.Field(default=1, ge=1)
    """Steps whose samples are read before they are needed."""

    @pydantic.model_validator(mode="after")
    def _check(self) -> Self:
        problems = [*self._source_problems(), *self._phase_problems(), *self._split_problems(), *self._order_problems()]
        if self.masking is not None:
            problems += self._masking_problems(self.masking)
        if problems:
            raise ValueError("\n".join(problems))
        return self

    def training_sources(self) -> list[SourceConfig]:
        """The sources of the training split; `train` is one source."""
        return self.sources or [SourceConfig(name=ONLY_SOURCE, paths=self.train)]

    def training_paths(self) -> list[str]:
        """The prefixes of all training shards."""
        return [path for source in self.training_sources() for path in source.paths]

    def paths(self, split: SplitName) -> list[str]:
        """The prefixes of the shards of a split: its own, or the training shards that it is a part of."""
        own = {"train": [], "validation": self.validation, "test": self.test}[split]
        return own or self.training_paths()

    def has(self, split: SplitName) -> bool:
        """Whether the run has this split."""
        if self.split is not None:
            return self.split[SPLITS.index(split)] > 0
        held_out = {"train": True, "validation": self.validation_fraction > 0, "test": False}[split]
        return held_out or bool({"train": [], "validation": self.validation, "test": self.test}[split])

    def sequences(self, split: SplitName, num_sequences: int) -> tuple[int, int]:
        """The sequences [first, end) that a split reads of a shard of `paths(split)`."""
        if self.split is not None:
            # As Megatron-LM places the borders: sums of normalised shares, times N, rounded.
            whole = sum(self.split)
            ends = list(itertools.accumulate((share / whole for share in self.split), initial=0.0))
            first, end = ends[SPLITS.index(split)], ends[SPLITS.index(split) + 1]
            return round(first * num_sequences), round(end * num_sequences)
        if self.validation or split == "test":
            return 0, num_sequences
        border = num_sequences - int(num_sequences * self.validation_fraction)
        return (0, border) if split == "train" else (border, num_sequences)

    def held_out(self) -> str:
        """What decides where the splits of a training shard end, for messages; empty where nothing does."""
        if self.split is not None:
            return f" (split = {self.split})"
        return "" if self.validation else f" (validation_fraction = {self.validation_fraction})"

    def _source_problems(self) -> Iterator[str]:
        if self.train and self.sources:
            yield "train has no effect beside sources; name its shards in a source"
        if not (self.train or self.sources):
            yield "train = []: no training shards; name at least one there, or in sources"
        names = [source.name for source in self.sources]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            yield f"sources has the name {twice} more than once; give each source its own"
        weights = [source.weight for source in self.sources if source.weight != 0]
        if self.sources and not weights:
            yield "sources.weight = 0 everywhere; give one source a share"
        if None in weights and any(weights):
            unweighted = next(source.name for source in self.sources if source.weight is None)
            yield f"sources: {unweighted} has no weight, but others have; give each one, or none"
        paths = [*self.train, *(path for source in self.sources for path in source.paths)]
        if len(set(paths)) < len(paths):
            twice = next(prefix for prefix in paths if paths.count(prefix) > 1)
            field = "train" if self.train else "sources"
            yield f"{field} names the shard {twice} more than once; name each once"
        for split in ("validation", "test"):
            if shared := sorted(set(paths) & set(getattr(self, split))):
                yield f"{split} holds the training shard {shared[0]}; a held-out split must be other data"

    def _phase_problems(self) -> Iterator[str]:
        names = [source.name for source in self.sources] or [ONLY_SOURCE]
        for number, phase in enumerate(self.phases):
            field = f"phases.{number}"
            if number and phase.from_step <= self.phases[number - 1].from_step:
                before = self.phases[number - 1].from_step
                yield f"{field}.from_step = {phase.from_step} is not above {before}, that of the phase before it"
            for name in phase.weights:
                if name not in names:
                    yield f"{field}.weights.{name}: no such source; {suggest(name, names)}"
            if not any(phase.weights.values()):
                yield f"{field}.weights = {phase.weights}: give one source a share"

    def _split_problems(self) -> Iterator[str]:
        if self.validation and self.validation_fraction:
            fraction = self.validation_fraction
            yield f"validation_fraction = {fraction} has no effect beside validation; remove one of them"
        if self.split is None:
            return
        if not self.split[0]:
            yield f"split = {self.split} leaves nothing to train on; give its first number a share"
        for field in ("validation", "test", "validation_fraction"):
            if getattr(self, field):
                yield f"{field} has no effect beside split; remove one of them"

    def _order_problems(self) -> Iterator[str]:
        if self.order == "megatron":
            if self.phases:
                yield 'phases: order = "megatron" knows none; remove them, or use order = "megalin"'
            if self.packing != "concatenate":
                yield f'packing = "{self.packing}": order = "megatron" knows none; use "concatenate"'
            if self.masking is not None:
                yield 'masking: order = "megatron" is one of next tokens; use order = "megalin"'
            for source in self.sources:
                if source.weight == 0:
                    yield f'sources: {source.name} has weight 0; order = "megatron" reads every source: remove it'
                if len(source.paths) > 1:
                    count = len(source.paths)
                    yield f'sources: {source.name} has {count} shards; order = "megatron" takes one a source'
        elif self.cache != DEFAULT_CACHE:
            yield f'cache = "{self.cache}" has no effect beside order = "megalin", which stores nothing; remove it'
        if self.packing != "concatenate":
            if not self.isolate_documents:
                yield f'isolate_documents = false: packing = "{self.packing}" keeps documents apart; remove one of them'
            if self.masking is not None:
                yield f'packing = "{self.packing}" has no effect beside masking; remove it'

    def _masking_problems(self, masking: MaskingConfig) -> Iterator[str]:
        if self.sequence_length < SMALLEST_LENGTH:
            yield (
                f"sequence_length = {self.sequence_length} has no room for [CLS], two [SEP] and text of both segments; "
                f"use at least {SMALLEST_LENGTH}"
            )
        elif masking.max_predictions > self.sequence_length - FRAME_TOKENS:
            yield (
                f"masking.max_predictions = {masking.max_predictions} is more than the "
                f"{self.sequence_length - FRAME_TOKENS} tokens of text in a sample; lower it"
            )
        if not self.isolate_documents:
            yield "isolate_documents = false has no effect beside masking; remove it"
