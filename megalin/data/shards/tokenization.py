"""Tokenization of a corpus: each part becomes a small shard, and these are merged into one per key."""

from __future__ import annotations

import functools
import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from megalin.data.corpus.batches import batches
from megalin.data.corpus.documents import HARMLESS, BadLine, Reader, lines_before
from megalin.data.corpus.inputs import PLAIN, content_suffix
from megalin.data.corpus.parts import (
    CorpusPart,
    CorpusProgress,
    PartSubset,
    ReportProgress,
    Run,
    discard,
    plan,
    records,
    run_parts,
)
from megalin.data.shards.indexed_dataset import ShardWriter, token_dtype
from megalin.data.shards.merging import concatenate
from megalin.data.tokenizers.formats import SpecialIds
from megalin.data.tokenizers.tokenizer import Tokenizer, TokenizerFiles
from megalin.errors import ConfigError, DataError
from megalin.files import open_input

_LISTED_BAD_LINES = 100


class PreprocessOptions(NamedTuple):
    """Options of `preprocess`."""

    json_keys: Sequence[str]  # one shard each; a text file's text goes to the only key
    output_prefix: str
    tokenizer: TokenizerFiles
    append_eod: bool
    workers: int
    on_bad_line: Literal["skip", "fail"]
    limit_bytes: int  # of a line or text file
    resume: bool = False  # keep the finished parts of an earlier run
    subset: PartSubset | None = None  # of the parts, for work on several hosts; then nothing is merged
    # Supervised data: the text under this key precedes the document, and its tokens do not count as labels.
    prompt_key: str | None = None


class PreprocessReport(NamedTuple):
    """Shards written, and bad lines."""

    prefixes: list[str]
    documents: int
    tokens: int
    bad_lines: dict[str, int]  # by kind
    listed: list[BadLine]  # the first hundred
    label_tokens: int | None  # that count as labels; None without a prompt key, where all do


class _Job(NamedTuple):
    tokenizer: TokenizerFiles
    keys: Sequence[str]
    prompt_key: str | None
    append_eod: bool
    limit_bytes: int
    fail: bool


def preprocess(
    paths: Sequence[Path], options: PreprocessOptions, *, on_progress: Callable[[CorpusProgress], None] = lambda _: None
) -> PreprocessReport | None:
    """Writes `<output_prefix>_<key>_document` for every key, one sequence a document, and a manifest for each.

    The parts are in `<output_prefix>.parts` until all are complete. A line that is bad for one key gives no document
    for any, so the shards of the keys stay aligned. The bytes written depend on the inputs and the tokenizer alone,
    not on workers, subsets or kills. Memory: a batch of 1 MiB a worker, and 12 bytes for each document of a part.

    With a prompt key, a document is the tokens of the prompt, then those of the text, each encoded alone, as generation
    encodes a prompt. A label mask is written, in which the text's tokens and the end of the document count as labels.
    A document whose text has no token is empty, whatever its prompt.

    Returns:
        The report; None for a subset, after which another call, with `resume` and no subset, writes the shards.

    Raises:
        ConfigError: incompatible options; a library is missing.
        DataError: a file or tokenizer cannot be read; no document has a token (nothing is written); a bad line where
            `on_bad_line` is "fail"; a worker died; the parts are of another corpus or other options.
        StorageError: the output cannot be written.
    """
    _check(paths, options)
    tokenizer = options.tokenizer.load()
    job = _Job(
        options.tokenizer,
        tuple(options.json_keys),
        options.prompt_key,
        options.append_eod,
        options.limit_bytes,
        options.on_bad_line == "fail",
    )
    special_tokens = options.tokenizer.special_tokens
    identity = {"digest": tokenizer.digest, "eod_id": tokenizer.eod_id, "special_tokens": special_tokens}
    settings = {**job._asdict(), "tokenizer": identity}
    folder = Path(f"{options.output_prefix}.parts")
    parts = plan(paths)
    run = Run(folder, settings, options.workers, options.resume, options.subset, on_progress)
    complete = run_parts(_tokenise, job, parts, run)
    if options.subset is not None:
        return None
    assert complete, folder
    prefixes = [f"{options.output_prefix}_{key}_document" for key in options.json_keys]
    sums = _collect(folder, parts, prefixes)
    dtype = token_dtype(tokenizer.vocab_size)
    for column, prefix in enumerate(prefixes):
        manifest = _manifest(sums, column, tokenizer, options, dtype)
        pieces = [_part_prefix(folder, part, column) for part in parts]
        concatenate(pieces, prefix, dtype, manifest, label_mask=options.prompt_key is not None)
    discard(folder)
    label_tokens = None if options.prompt_key is None else sum(sums.label_tokens)
    return PreprocessReport(prefixes, sums.documents, sum(sums.tokens), sums.bad_lines, sums.listed, label_tokens)


class _Sums(NamedTuple):
    """Sums of the records of all parts."""

    documents: int
    tokens: list[int]  # of each key
    label_tokens: list[int]
    sequences: list[int]
    bad_lines: dict[str, int]
    listed: list[BadLine]
    inputs: list[dict[str, Any]]


def _check(paths: Sequence[Path], options: PreprocessOptions) -> None:
    plain = [path for path in paths if content_suffix(path) == PLAIN]
    if plain and len(options.json_keys) != 1:
        raise ConfigError(f"--json-keys {' '.join(options.json_keys)}: {plain[0]} is plain text; give a single key")
    if plain and options.prompt_key is not None:
        raise ConfigError(
            f"--prompt-key {options.prompt_key}: {plain[0]} is plain text; give jsonl or parquet with a prompt and "
            "an answer in each line"
        )
    if options.prompt_key in options.json_keys:
        raise ConfigError(
            f"--prompt-key {options.prompt_key}: also one of --json-keys {' '.join(options.json_keys)}; name the key "
            "of the answer there"
        )
    if len(set(options.json_keys)) != len(options.json_keys) or not options.json_keys:
        raise ConfigError(f"--json-keys {' '.join(options.json_keys)}: give each key once")
    if any("/" in key or "\0" in key for key in options.json_keys):
        raise ConfigError(
            f"--json-keys {' '.join(options.json_keys)}: a key is part of a file name, so it must not contain '/'"
        )
    if options.limit_bytes < 1:
        raise ConfigError(f"--max-document-bytes {options.limit_bytes}: must be at least 1")


def _part_prefix(folder: Path, part: CorpusPart, column: int) -> Path:
    return folder / f"{part.number:06}-{column}"


def _collect(folder: Path, parts: Sequence[CorpusPart], prefixes: Sequence[str]) -> _Sums:
    """Sums the records; line numbers continue over the parts of a file.

    Raises:
        DataError: no document has a token.
    """
    documents = 0
    tokens, label_tokens, sequences = ([0] * len(prefixes) for _ in range(3))
    bad_lines: Counter[str] = Counter()
    listed: list[BadLine] = []
    inputs: list[dict[str, Any]] = []
    for part, record in zip(parts, records(folder, parts), strict=True):
        if part.first:
            lines = 0
            inputs.append({"path": part.span.path, "sha256": record["sha256"], "bytes": 0, "documents": 0})
        inputs[-1]["bytes"] += part.size_bytes
        inputs[-1]["documents"] += record["documents"]
        documents += record["documents"]
        tokens = [a + b for a, b in zip(tokens, record["tokens"], strict=True)]
        label_tokens = [a + b for a, b in zip(label_tokens, record["label_tokens"], strict=True)]
        sequences = [a + b for a, b in zip(sequences, record["sequences"], strict=True)]
        bad_lines.update(record["bad_lines"])
        for path, line, kind, detail in record["listed"][: _LISTED_BAD_LINES - len(listed)]:
            listed.append(BadLine(path, lines + line, kind, detail))
        lines += record["lines"]
    for prefix, count in zip(prefixes, tokens, strict=True):
        if not count:
            kinds = ", ".join(f"{number} x {kind}" for kind, number in bad_lines.items()) or "none"
            discard(folder)
            raise DataError(
                f"{prefix}: empty corpus: {documents} documents without a token (bad lines: {kinds}); "
                "check --input and --json-keys"
            )
    return _Sums(documents, tokens, label_tokens, sequences, dict(sorted(bad_lines.items())), listed, inputs)


def _manifest(
    sums: _Sums, column: int, tokenizer: Tokenizer, options: PreprocessOptions, dtype: np.dtype[Any]
) -> Mapping[str, Any]:
    supervised = {"prompt_key": options.prompt_key, "label_tokens": sums.label_tokens[column]}
    return {
        "documents": sums.documents,
        "sequences": sums.sequences[column],
        "tokens": sums.tokens[column],
        **({} if options.prompt_key is None else supervised),
        "dtype": dtype.name,
        "append_eod": options.append_eod,
        "tokenizer": {
            "source": str(options.tokenizer),
            "digest": tokenizer.digest,
            "vocab_size": tokenizer.vocab_size,
            "eod_id": tokenizer.eod_id,
            "special_tokens": options.tokenizer.special_tokens,
        },
        "bad_lines": sums.bad_lines,
        "first_bad_lines": [str(bad) for bad in sums.listed],
        "inputs": sums.inputs,
    }


@functools.lru_cache(maxsize=1)
def _load_once(files: TokenizerFiles) -> Tokenizer:
    return files.load()


def _tokenise(job: _Job, part: CorpusPart, folder: Path, report: ReportProgress) -> Mapping[str, Any]:
    """Writes a part's shard for every key; returns its record, with the counts and the bad lines."""
    tokenizer = _load_once(job.tokenizer._replace(special_tokens=False))
    special = tokenizer.special if job.tokenizer.special_tokens else SpecialIds()
    dtype = token_dtype(tokenizer.vocab_size)
    bad_lines: Counter[str] = Counter()
    listed: list[BadLine] = []
    supervised = job.prompt_key is not None
    with ExitStack() as stack:
        writers = [
            stack.enter_context(
                ShardWriter(_part_prefix(folder, part, column), dtype, label_mask=supervised, manifest=False)
            )
            for column in range(len(job.keys))
        ]
        prompt_keys = () if job.prompt_key is None else (job.prompt_key,)
        reader = Reader(part.span, (*job.keys, *prompt_keys), limit_bytes=job.limit_bytes)
        for batch in batches(reader):
            for line in batch.bad_lines:
                if job.fail and line.kind != HARMLESS:
                    place = line._replace(line=line.line + lines_before(part.span))
                    raise DataError(f"{place}; fix the line, or skip bad lines with --on-bad-line skip")
            bad_lines.update(line.kind for line in batch.bad_lines)
            listed.extend(batch.bad_lines[: _LISTED_BAD_LINES - len(listed)])
            before = sum(writer.num_tokens for writer in writers)
            prompts = [document.texts[-1] for document in batch.documents] if supervised else None
            for column, writer in enumerate(writers):
                texts = [document.texts[column] for document in batch.documents]
                _encode(prompts, texts, tokenizer, special, writer, job.append_eod)
            tokens = sum(writer.num_tokens for writer in writers) - before
            report(CorpusProgress(len(batch.documents), tokens, batch.read_bytes, len(batch.bad_lines)))
        for writer in writers:
            writer.publish()
    return {
        "documents": writers[0].num_documents,
        "tokens": [writer.num_tokens for writer in writers],
        "label_tokens": [writer.label_tokens for writer in writers],
        "sequences": [writer.num_sequences for writer in writers],
        "lines": reader.lines,
        "bad_lines": bad_lines,
        "listed": listed,
        "sha256": _sha256(part.span.path) if part.first else None,
    }


def _sha256(path: str) -> str:
    """sha256 of a file, in hex. Raises DataError."""
    with open_input(Path(path), remedy="check --input") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _encode(
    prompts: Sequence[str] | None,
    texts: Sequence[str],
    tokenizer: Tokenizer,
    special: SpecialIds,
    writer: ShardWriter,
    append_eod: bool,
) -> None:
    """Writes a document for each text, after its prompt if there are prompts, with special ids around both together."""
    before = [[]] * len(texts) if prompts is None else tokenizer.encode_batch(prompts)
    for prompt, text in zip(before, tokenizer.encode_batch(texts), strict=True):
        if prompts is None:
            begin, ids = [], [*special.before, *text, *special.after]
        else:
            begin, ids = [*special.before, *prompt], [*text, *special.after] if text else []
        if ids:  # an empty document has no sequence and no end, as in Megatron
            if append_eod:
                ids.append(tokenizer.eod_id)
            mask = None if prompts is None else np.arange(len(begin) + len(ids)) >= len(begin)
            writer.add_sequence(np.array(begin + ids, writer.dtype), mask)
        writer.end_document()
