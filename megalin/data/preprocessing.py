"""From text to token shards: read, tokenise in any number of processes, write; the result is the same for each."""

from __future__ import annotations

import functools
import multiprocessing
import multiprocessing.connection
import os
import threading
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from megalin.data.corpus import HARMLESS, BadLine, Documents, RawDocument, parse_raw, read_raw
from megalin.data.shards import ShardWriter, token_dtype
from megalin.data.tokenizer import Tokenizer, load_tokenizer
from megalin.errors import ConfigError, DataError

_BATCH_BYTES = 1 << 20
_BATCH_DOCUMENTS = 1000
_BATCHES_AHEAD = 2  # a worker, so that none waits while the batch before its own is written
_LISTED_BAD_LINES = 100


class PreprocessOptions(NamedTuple):
    """What `preprocess` does with its files."""

    json_keys: Sequence[str]  # one shard each; a text file's text goes to the only key
    output_prefix: str
    tokenizer: str  # path of a tokenizer.json, or "bytes"
    append_eod: bool
    workers: int
    on_bad_line: Literal["skip", "fail"]
    limit_bytes: int  # of a line or text file


class Progress(NamedTuple):
    """Counts so far."""

    documents: int
    tokens: int
    read_bytes: int
    bad_lines: int


class PreprocessReport(NamedTuple):
    """What was written and what was left out."""

    prefixes: list[str]
    documents: int
    tokens: int
    bad_lines: dict[str, int]  # by kind
    listed: list[BadLine]  # the first hundred


class _Job(NamedTuple):
    tokenizer: str
    keys: Sequence[str]
    append_eod: bool
    limit_bytes: int


class _Encoded(NamedTuple):
    """A batch after its worker: for each key the documents' ids end to end, and how many each document has."""

    ids: list[npt.NDArray[Any]]
    lengths: list[list[int]]
    bad: list[BadLine]
    read_bytes: int


def preprocess(
    paths: Sequence[Path], options: PreprocessOptions, *, on_progress: Callable[[Progress], None] = lambda _: None
) -> PreprocessReport:
    """Writes `<output_prefix>_<key>_document` for every key, one sequence a document, and a manifest beside each.

    A line that is bad for one key gives no document for any, so the shards of the keys stay aligned. Memory: a few
    batches of 1 MiB a worker, and 12 bytes a document.

    Raises:
        ConfigError: options that exclude each other.
        DataError: a file or tokenizer that cannot be read; no document with a token (nothing is written); a bad line
            where `on_bad_line` is "fail"; a worker that died.
        StorageError: the output cannot be written.
    """
    _check(paths, options)
    tokenizer = load_tokenizer(options.tokenizer)
    job = _Job(options.tokenizer, tuple(options.json_keys), options.append_eod, options.limit_bytes)
    prefixes = [f"{options.output_prefix}_{key}_document" for key in options.json_keys]
    bad_lines: Counter[str] = Counter()
    listed: list[BadLine] = []
    read_bytes = 0
    with ExitStack() as stack:
        dtype = token_dtype(tokenizer.vocab_size)
        writers = [stack.enter_context(ShardWriter(prefix, dtype)) for prefix in prefixes]
        batches = _batches(paths, options.limit_bytes)
        results = stack.enter_context(closing(_encode_all(batches, job, tokenizer, options.workers)))
        for encoded in results:
            for bad in encoded.bad:
                if options.on_bad_line == "fail" and bad.kind != HARMLESS:
                    raise DataError(f"{bad}; mend the line, or leave bad lines out with --on-bad-line skip")
                bad_lines[bad.kind] += 1
                if len(listed) < _LISTED_BAD_LINES:
                    listed.append(bad)
            for writer, ids, lengths in zip(writers, encoded.ids, encoded.lengths, strict=True):
                _write(writer, ids, lengths)
            read_bytes += encoded.read_bytes
            tokens = sum(writer.num_tokens for writer in writers)
            on_progress(Progress(writers[0].num_documents, tokens, read_bytes, bad_lines.total()))
        report = PreprocessReport(
            prefixes,
            writers[0].num_documents,
            sum(w.num_tokens for w in writers),
            dict(sorted(bad_lines.items())),
            listed,
        )
        _check_result(report, writers)
        for writer in writers:
            writer.publish(_manifest(writer, report, tokenizer, options))
    return report


def _check(paths: Sequence[Path], options: PreprocessOptions) -> None:
    plain = [path for path in paths if path.suffix == ".txt"]
    if plain and len(options.json_keys) != 1:
        raise ConfigError(f"--json-keys {' '.join(options.json_keys)}: {plain[0]} is plain text; give a single key")
    if len(set(options.json_keys)) != len(options.json_keys) or not options.json_keys:
        raise ConfigError(f"--json-keys {' '.join(options.json_keys)}: give each key once")
    if any("/" in key or "\0" in key for key in options.json_keys):
        raise ConfigError(f"--json-keys {' '.join(options.json_keys)}: a key names a file, so it has no '/'")
    if options.workers < 1:
        raise ConfigError(f"--workers {options.workers}: at least 1 is needed")
    if options.limit_bytes < 1:
        raise ConfigError(f"--max-document-bytes {options.limit_bytes}: at least 1 is needed")


def _check_result(report: PreprocessReport, writers: Sequence[ShardWriter]) -> None:
    for writer in writers:
        if not writer.num_tokens:
            kinds = ", ".join(f"{count} x {kind}" for kind, count in report.bad_lines.items()) or "none"
            raise DataError(
                f"{writer.prefix}: empty corpus: {report.documents} documents without a token (bad lines: {kinds}); "
                "check --input and --json-keys"
            )


def _write(writer: ShardWriter, ids: npt.NDArray[Any], lengths: Sequence[int]) -> None:
    position = 0
    for length in lengths:
        if length:  # an empty document has no sequence, as in Megatron
            writer.add_sequence(ids[position : position + length])
        writer.end_document()
        position += length
    assert position == len(ids), (position, len(ids))


def _manifest(
    writer: ShardWriter, report: PreprocessReport, tokenizer: Tokenizer, options: PreprocessOptions
) -> dict[str, Any]:
    return {
        "documents": writer.num_documents,
        "sequences": writer.num_sequences,
        "tokens": writer.num_tokens,
        "dtype": writer.dtype.name,
        "append_eod": options.append_eod,
        "tokenizer": {
            "source": options.tokenizer,
            "digest": tokenizer.digest,
            "vocab_size": tokenizer.vocab_size,
            "eod_id": tokenizer.eod_id,
        },
        "bad_lines": report.bad_lines,
        "first_bad_lines": [str(bad) for bad in report.listed],
    }


def _batches(paths: Iterable[Path], limit_bytes: int) -> Iterator[list[RawDocument]]:
    batch: list[RawDocument] = []
    size = 0
    for path in paths:
        for raw in read_raw(path, limit_bytes=limit_bytes):
            batch.append(raw)
            size += len(raw.data or b"")
            if size >= _BATCH_BYTES or len(batch) >= _BATCH_DOCUMENTS:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch


def _encode_all(
    batches: Iterable[list[RawDocument]], job: _Job, tokenizer: Tokenizer, workers: int
) -> Generator[_Encoded, None, None]:
    """The batches encoded, in their order, with a bounded number of them in flight."""
    if workers == 1:
        for batch in batches:
            yield _encode(batch, job, tokenizer)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_start_worker) as pool:
        pending: deque[Future[_Encoded]] = deque()
        try:
            for batch in batches:
                pending.append(pool.submit(_encode_in_worker, batch, job))
                if len(pending) >= workers * (1 + _BATCHES_AHEAD):
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        except BrokenProcessPool as error:
            raise DataError(
                f"a worker process died (out of memory?): {error}; use fewer --workers or lower --max-document-bytes"
            ) from None
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _start_worker() -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    """A reader that is killed cannot end its workers, and they would wait for work for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    multiprocessing.connection.wait([parent.sentinel])
    os._exit(1)


@functools.lru_cache(maxsize=1)
def _load_once(path: str) -> Tokenizer:
    return load_tokenizer(path)


def _encode_in_worker(batch: list[RawDocument], job: _Job) -> _Encoded:
    return _encode(batch, job, _load_once(job.tokenizer))


def _encode(batch: Sequence[RawDocument], job: _Job, tokenizer: Tokenizer) -> _Encoded:
    parsed = [parse_raw(raw, job.keys, limit_bytes=job.limit_bytes) for raw in batch]
    good = [document for document in parsed if isinstance(document, Documents)]
    dtype = token_dtype(tokenizer.vocab_size)
    all_ids, all_lengths = [], []
    for column in range(len(job.keys)):
        encoded = tokenizer.encode_batch([document.texts[column] for document in good])
        if job.append_eod:
            encoded = [[*ids, tokenizer.eod_id] if ids else ids for ids in encoded]
        parts = [np.array(ids, dtype) for ids in encoded]
        all_ids.append(np.concatenate(parts) if parts else np.empty(0, dtype))
        all_lengths.append([len(ids) for ids in encoded])
    return _Encoded(
        ids=all_ids,
        lengths=all_lengths,
        bad=[document for document in parsed if isinstance(document, BadLine)],
        read_bytes=sum(len(raw.data or b"") for raw in batch),
    )
