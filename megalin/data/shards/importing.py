"""Import of other systems' token files as one shard: documents from an index, or from the token that ends or starts
them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
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
        tokenizer: source and tokenizer of the ids; gives the vocabulary size and a manifest.
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
    with ExitStack() as stack:
        files = [stack.enter_context(TokenFile(path, form, dtype)) for path in paths]
        _check_boundaries(files, boundaries)
        narrow = all(file.dtype.kind == "u" and file.dtype.itemsize <= 2 for file in files)
        written = token_dtype(vocab_size) if vocab_size is not None else token_dtype(1 if narrow else 2**31)
        limit = vocab_size if vocab_size is not None else int(np.iinfo(written).max) + 1
        masked = any(file.has_label_mask for file in files)
        writer = stack.enter_context(ShardWriter(output, written, label_mask=masked))
        read_bytes = 0
        for tokens, mask in _documents(files, boundaries, limit):
            writer.add_sequence(tokens, mask if masked else None)
            writer.end_document()
            read_bytes += tokens.nbytes
            if writer.num_documents % _PROGRESS_DOCUMENTS == 0:
                on_progress(CorpusProgress(writer.num_documents, writer.num_tokens, read_bytes, 0))
        writer.publish(None if tokenizer is None else _manifest(files, writer, *tokenizer))
    formats = tuple(dict.fromkeys(file.format for file in files))
    return ImportedTokens(writer.num_documents, writer.num_tokens, formats)


def _check_boundaries(files: Sequence[TokenFile], boundaries: Boundaries | None) -> None:
    indexed = [file.path for file in files if file.ends is not None]
    if indexed and boundaries is not None:
        raise ConfigError(
            f"{indexed[0]}: has an index of its documents; leave --eod-id, --bos-id and --one-document out"
        )
    if boundaries is None and len(indexed) < len(files):
        path = next(file.path for file in files if file.ends is None)
        raise ConfigError(
            f"{path}: has no index of its documents; give --eod-id or --bos-id, the token that ends or starts each "
            "(GPT-2: 50256; nanoGPT ends with it, llm.c starts with it), or --one-document"
        )


def _documents(
    files: Sequence[TokenFile], boundaries: Boundaries | None, limit: int
) -> Iterator[tuple[Tokens, npt.NDArray[np.bool_] | None]]:
    """Yields the tokens of each document, and which of them count as labels where the file says so."""
    if boundaries is None or boundaries.kind == "file":
        for file in files:
            ends = [file.num_tokens] if file.ends is None else file.ends.tolist()
            for start, end in itertools.pairwise([0, *ends]):
                if end - start > _MAX_LENGTH:
                    raise DataError(
                        f"{file.path}: a document of {end - start} tokens; a sequence has at most {_MAX_LENGTH}: give "
                        "the token that ends or starts documents"
                    )
                tokens = file.read(start, end - start)
                _check_ids(file, start, tokens, limit)
                yield tokens, file.read_label_mask(start, end - start)
        return
    for tokens in _split(_blocks(files, limit), boundaries, files[0].path):
        yield tokens, None


def _blocks(files: Sequence[TokenFile], limit: int) -> Iterator[Tokens]:
    for file in files:
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


def _manifest(files: Sequence[TokenFile], writer: ShardWriter, source: str, tokenizer: Tokenizer) -> dict[str, Any]:
    labels = {"label_tokens": writer.label_tokens} if any(file.has_label_mask for file in files) else {}
    return {
        "documents": writer.num_documents,
        "sequences": writer.num_sequences,
        "tokens": writer.num_tokens,
        **labels,
        "dtype": writer.dtype.name,
        "tokenizer": {
            "source": source,
            "digest": tokenizer.digest,
            "vocab_size": tokenizer.vocab_size,
            "eod_id": tokenizer.eod_id,
        },
        "inputs": [{"path": str(file.path), "format": file.format, "tokens": file.num_tokens} for file in files],
    }
