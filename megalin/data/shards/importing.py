"""Import of other systems' token files as one shard: documents from an index, or from the token that ends or starts
them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from megalin.data.corpus.parts import CorpusProgress
from megalin.data.shards.indexed_dataset import ShardWriter, bin_path, token_dtype
from megalin.data.shards.token_files import Format, TokenFile
from megalin.data.tokenizers.tokenizer import Tokenizer
from megalin.errors import ConfigError, DataError

_BLOCK_TOKENS = 1 << 22
_MAX_LENGTH = 2**31 - 1  # of a sequence
_PROGRESS_DOCUMENTS = 1000

Tokens = npt.NDArray[Any]


class Boundaries(NamedTuple):
    """Rule that finds the documents of files without an index."""

    kind: Literal["end", "start", "file"]
    """end, start: `token` ends or starts each document, which may continue in the next file. file: one a file."""
    token: int = -1


class _Source(NamedTuple):
    """A validated file. It is opened again to be read, so that any number of files can be imported."""

    path: Path
    format: Format
    dtype: np.dtype[Any]
    num_tokens: int
    indexed: bool
    masked: bool

    def open(self) -> TokenFile:
        """Opens the file. Raises DataError."""
        return TokenFile(self.path, self.format, self.dtype.name if self.format == "raw" else None)


class ImportedTokens(NamedTuple):
    """Counts of a new shard."""

    documents: int
    tokens: int
    formats: tuple[Format, ...]


def import_tokens(
    paths: Sequence[Path],
    output: Path,
    *,
    boundaries: Boundaries | None,
    form: Format | None = None,
    dtype: str | None = None,
    tokenizer: tuple[str, Tokenizer] | None = None,
    vocab_size: int | None = None,
    on_progress: Callable[[CorpusProgress], None] = lambda _: None,
) -> ImportedTokens:
    """Writes the tokens of all files, in this order and unchanged, as the shard `output`, one sequence a document.

    Args:
        boundaries: of files without an index; None if all have one.
        form: format of all files; None: recognised.
        dtype: of raw files.
        tokenizer: source and tokenizer of the ids; gives the vocabulary size, and stands in the manifest.
        vocab_size: ids are below it; None: any. The shard is uint16 or int32 by it, else by the files' widths.

    Raises:
        ConfigError: no boundaries, or boundaries that a file has already; an input among the files to write.
        DataError: a bad file, an id beyond the vocabulary, or a token of `boundaries` that does not occur.
        StorageError: the shard cannot be written; then no file has its name.
    """
    if tokenizer is not None:
        vocab_size = tokenizer[1].vocab_size
    if bin_path(output).resolve() in [path.resolve() for path in paths]:
        raise ConfigError(f"--output-prefix {output}: {bin_path(output)} is an input; choose another prefix")
    sources = [_validated(path, form, dtype) for path in paths]
    _check_boundaries(sources, boundaries)
    if not any(source.num_tokens for source in sources):
        raise DataError(f"{paths[0]}: no tokens in {len(paths)} file(s); check --input")
    narrow = all(source.dtype.kind == "u" and source.dtype.itemsize <= 2 for source in sources)
    written = token_dtype(vocab_size) if vocab_size is not None else token_dtype(1 if narrow else 2**31)
    limit = vocab_size if vocab_size is not None else int(np.iinfo(written).max) + 1
    masked, read_bytes = any(source.masked for source in sources), 0
    with ShardWriter(output, written, label_mask=masked) as writer:
        for tokens, mask in _documents(sources, boundaries, limit):
            writer.add_sequence(tokens, mask if masked else None)
            writer.end_document()
            read_bytes += tokens.nbytes
            if writer.num_documents % _PROGRESS_DOCUMENTS == 0:
                on_progress(CorpusProgress(writer.num_documents, writer.num_tokens, read_bytes, 0))
        writer.publish(_manifest(sources, tokenizer))
    formats = tuple(dict.fromkeys(source.format for source in sources))
    return ImportedTokens(writer.num_documents, writer.num_tokens, formats)


def _validated(path: Path, form: Format | None, dtype: str | None) -> _Source:
    with TokenFile(path, form, dtype) as file:
        indexed = file.ends is not None
        return _Source(path, file.format, file.dtype, file.num_tokens, indexed, file.has_label_mask)


def _check_boundaries(sources: Sequence[_Source], boundaries: Boundaries | None) -> None:
    indexed = [source.path for source in sources if source.indexed]
    if indexed and boundaries is not None:
        raise ConfigError(
            f"{indexed[0]}: has an index of its documents; leave --eod-id, --bos-id and --one-document out"
        )
    if boundaries is None and len(indexed) < len(sources):
        path = next(source.path for source in sources if not source.indexed)
        raise ConfigError(
            f"{path}: has no index of its documents; give --eod-id or --bos-id, the token that ends or starts each "
            "(GPT-2: 50256; nanoGPT ends with it, llm.c starts with it), or --one-document"
        )


def _documents(
    sources: Sequence[_Source], boundaries: Boundaries | None, limit: int
) -> Iterator[tuple[Tokens, npt.NDArray[np.bool_] | None]]:
    """Yields the tokens of each document, and which of them count as labels where the file says so."""
    if boundaries is None or boundaries.kind == "file":
        for source in sources:
            with source.open() as file:
                yield from _documents_of(file, limit)
        return
    for tokens in _split(_blocks(sources, limit), boundaries, sources[0].path):
        yield tokens, None


def _documents_of(file: TokenFile, limit: int) -> Iterator[tuple[Tokens, npt.NDArray[np.bool_]]]:
    """Yields the documents of the file's index, or the whole file."""
    ends = [file.num_tokens] if file.ends is None else file.ends.tolist()
    for start, end in itertools.pairwise([0, *ends]):
        if end - start > _MAX_LENGTH:
            raise DataError(
                f"{file.path}: a document of {end - start} tokens; a sequence has at most {_MAX_LENGTH}: give the "
                "token that ends or starts documents"
            )
        tokens = file.read(start, end - start)
        _check_ids(file, start, tokens, limit)
        yield tokens, file.read_label_mask(start, end - start)


def _blocks(sources: Sequence[_Source], limit: int) -> Iterator[Tokens]:
    for source in sources:
        with source.open() as file:
            position = 0
            for block in file.blocks(_BLOCK_TOKENS):
                _check_ids(file, position, block, limit)
                yield block
                position += block.size


def _split(blocks: Iterator[Tokens], boundaries: Boundaries, path: Path) -> Iterator[Tokens]:
    """Cuts the stream after, or before, each boundary token; the rest of the stream is a document too."""
    pending: list[Tokens] = []
    found = False
    for block in blocks:
        first = 0
        for place in np.flatnonzero(block == boundaries.token).tolist():
            found = True
            cut = place + (boundaries.kind == "end")
            pending.append(block[first:cut])
            document = pending[0] if len(pending) == 1 else np.concatenate(pending)
            pending, first = [], cut
            if document.size:
                yield document
        pending.append(block[first:])
    if not found:
        raise DataError(f"{path}: the token {boundaries.token} does not occur; is it the id of the files' tokenizer?")
    rest = np.concatenate(pending)
    if rest.size:
        yield rest


def _check_ids(file: TokenFile, position: int, tokens: Tokens, limit: int) -> None:
    if not tokens.size or (int(tokens.max()) < limit and int(tokens.min()) >= 0):
        return
    bad = int(np.flatnonzero((tokens < 0) | (tokens >= limit))[0])
    raise DataError(
        f"{file.path}: token id {tokens[bad]} at position {position + bad}; expected ids from 0 to {limit - 1}: check "
        "the vocabulary, --format and --dtype"
    )


def _manifest(sources: Sequence[_Source], tokenizer: tuple[str, Tokenizer] | None) -> dict[str, Any]:
    """Entries besides the counts and digests."""
    inputs = [{"path": str(source.path), "format": source.format, "tokens": source.num_tokens} for source in sources]
    if tokenizer is None:
        return {"inputs": inputs}
    name, loaded = tokenizer
    entry = {"digest": loaded.digest, "vocab_size": loaded.vocab_size, "eod_id": loaded.eod_id}
    return {"tokenizer": {"source": name, **entry}, "inputs": inputs}
