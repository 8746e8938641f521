"""Haystacks of held-out documents: the texts of a run's split in which needles are hidden."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Literal, get_args

from megalin.data.config import SplitName
from megalin.data.datasets.token import open_parts
from megalin.data.tokenizers.tokenizer import Tokenizer
from megalin.errors import ConfigError
from megalin.train.config import RunConfig

Haystack = Literal["noise", "documents"]
HAYSTACKS: tuple[Haystack, ...] = get_args(Haystack)

_MOST_TOKENS = 1 << 20  # in memory, about 40 bytes each; longer contexts have as many as they take


def read_documents(config: RunConfig, split: SplitName, tokenizer: Tokenizer, *, longest: int) -> list[list[int]]:
    """The first documents of a split, of `longest` or 2^20 tokens in all, whichever is more. An empty line takes the
    place of the id that ends a document, so that a prompt is one document.

    Raises:
        ConfigError: the run has no such split.
        DataError: a shard is missing or damaged, or was made by another tokenizer.
    """
    if not config.data.has(split):
        raise ConfigError(
            f"a haystack of documents reads data.{split}, which the run does not have; name shards there, or use "
            "--haystack noise"
        )
    left, documents = max(longest, _MOST_TOKENS), list[list[int]]()
    separator, vocab_size = tokenizer.encode("\n\n"), config.model.vocab_size
    with ExitStack() as stack:
        for shard, first, end in open_parts(config.data, split, vocab_size, config.data.paths(split), stack):
            for sequence in range(first, end):
                if left <= 0:
                    return documents
                count = min(int(shard.lengths[sequence]), left)
                ids = shard.read_checked(shard.first_token(sequence), count, vocab_size=vocab_size)
                documents.append([*ids[ids != tokenizer.eod_id].tolist(), *separator])
                left -= len(documents[-1])
    return documents
