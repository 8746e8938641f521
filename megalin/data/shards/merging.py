"""Merging and splitting of shards by documents, in constant memory."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt

from megalin.data.shards.digests import BlockHasher
from megalin.data.shards.index_file import MAX_SEQUENCES
from megalin.data.shards.indexed_dataset import Shard, bin_path, manifest_path, publish_shard
from megalin.data.shards.label_mask import LabelMaskWriter
from megalin.data.shards.manifest import ShardTokenizer, read_manifest
from megalin.errors import ConfigError, DataError
from megalin.files import open_temporary, storage_errors, temporary_name

_COPY_TOKENS = 1 << 22


class DocumentRange(NamedTuple):
    """Documents [first, end) of a shard."""

    shard: Shard
    first: int
    end: int


class WrittenShard(NamedTuple):
    """Counts of a new shard."""

    prefix: str
    documents: int
    sequences: int
    tokens: int


def merge_shards(prefixes: Sequence[str | Path], output: str | Path) -> WrittenShard:
    """Writes the documents of all shards, in this order, as the shard `output`; the same bytes as Megatron's merge.

    The new manifest holds the digests and the origin of the documents, and the tokenizer if every shard's manifest
    names it. If any shard has a label mask, the new one has too; the tokens of shards without one all count as labels.

    Raises:
        ConfigError: no shard, or one of them is the output.
        DataError: a bad shard; shards of different token dtypes or tokenizers; 2^31 sequences and more.
        StorageError: the output cannot be written; then no shard has its name.
    """
    _check_names(prefixes, [output])
    with ExitStack() as stack:
        shards = [stack.enter_context(Shard(prefix)) for prefix in prefixes]
        for shard in shards[1:]:
            if shard.dtype != shards[0].dtype:
                raise DataError(
                    f"{shard.prefix}: tokens of {shard.dtype.name}, but {shards[0].prefix} has {shards[0].dtype.name}; "
                    "shards to merge need the same dtype: preprocess one of them again"
                )
        return _write([DocumentRange(shard, 0, shard.num_documents) for shard in shards], output)


def split_shard(prefix: str | Path, outputs: Sequence[str | Path], weights: Sequence[float]) -> list[WrittenShard]:
    """Splits a shard's documents into consecutive parts; boundary k is round(documents x sum of the first k fractions).

    Each part has its bits of the shard's label mask, if there is one.

    Raises:
        ConfigError: not one positive weight per output, an output twice, or the shard itself as output.
        DataError: a bad shard, or a part without documents.
        StorageError: an output cannot be written.
    """
    _check_names([prefix], outputs)
    if len(weights) != len(outputs) or not all(0 < weight < float("inf") for weight in weights):
        raise ConfigError(
            f"weights {', '.join(map(str, weights))} for {len(outputs)} parts; give a positive weight for each"
        )
    with Shard(prefix) as shard:
        fractions = np.cumsum([0.0, *weights]) / sum(weights)
        boundaries = [round(fraction * shard.num_documents) for fraction in fractions.tolist()]
        parts = [DocumentRange(shard, *pair) for pair in itertools.pairwise(boundaries)]
        for part, output in zip(parts, outputs, strict=True):
            if part.first == part.end:
                raise DataError(
                    f"{output}: would get none of the {shard.num_documents} documents of {prefix}; "
                    "raise its weight or split a larger shard"
                )
        return [_write([part], output) for part, output in zip(parts, outputs, strict=True)]


def concatenate(
    prefixes: Sequence[Path],
    output: str | Path,
    dtype: np.dtype[Any],
    manifest: Mapping[str, Any],
    *,
    label_mask: bool = False,
) -> None:
    """Writes the documents of many shards of `dtype`, one open at a time, as the shard `output` with this manifest.

    Args:
        label_mask: write a label mask too; the tokens of shards without one all count as labels.

    Raises:
        DataError: a bad shard; 2^31 sequences and more.
        StorageError: the output cannot be written; then no shard has its name.
    """
    path, sequences = bin_path(output), 0
    # The index begins with its counts, so its entries wait in unnamed files; they may not fit into memory.
    with (
        storage_errors(path),
        TemporaryFile(dir=path.parent) as lengths,
        TemporaryFile(dir=path.parent) as documents,
        open_temporary(path) as file,
        ExitStack() as discard,
    ):
        discard.callback(temporary_name(path).unlink, missing_ok=True)
        mask, blocks = _mask_writer(output, discard) if label_mask else None, BlockHasher()
        documents.write(np.zeros(1, np.int64).data)  # each shard's own index begins with a 0, which is skipped below
        for prefix in prefixes:
            with Shard(prefix) as shard:
                assert shard.dtype == dtype, (prefix, shard.dtype, dtype)
                _check_total(sequences + shard.num_sequences, output)
                _copy(shard, 0, shard.num_tokens, file, path, mask, blocks)
                lengths.write(shard.lengths.data)
                documents.write((shard.documents[1:] + sequences).data)
                sequences += shard.num_sequences
        index = _mapped(lengths, np.dtype(np.int32)), _mapped(documents, np.dtype(np.int64))
        publish_shard(Path(output), file, dtype, [index[0]], [(index[1], 0)], manifest, mask, blocks)
        discard.pop_all()


def _mapped(file: IO[bytes], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Maps the content of `file`."""
    file.flush()
    return np.memmap(file, dtype, "r") if file.tell() else np.empty(0, dtype)


def _check_total(sequences: int, output: str | Path) -> None:
    if sequences > MAX_SEQUENCES:
        raise DataError(f"{output}: {sequences} sequences; a shard holds at most {MAX_SEQUENCES}: write several shards")


def _mask_writer(output: str | Path, discard: ExitStack) -> LabelMaskWriter:
    """Starts the label mask of `output`; `discard` removes it."""
    writer = LabelMaskWriter(output)
    discard.callback(writer.discard)
    return writer


def _copy(
    shard: Shard,
    start: int,
    end: int,
    file: BinaryIO,
    path: Path,
    mask: LabelMaskWriter | None,
    blocks: BlockHasher,
) -> None:
    """Appends tokens [start, end) of `shard` to `file`, the temporary file of `path`, and to `blocks`, and their bits
    to `mask`."""
    for first in range(start, end, _COPY_TOKENS):
        count = min(_COPY_TOKENS, end - first)
        block = shard.read(first, count)
        with storage_errors(path):
            file.write(block.data)
        blocks.update(block.data)
        if mask is not None:
            mask.add(shard.read_label_mask(first, count))


def _check_names(inputs: Sequence[str | Path], outputs: Sequence[str | Path]) -> None:
    if not inputs:
        raise ConfigError("no shard to read; give at least one prefix")
    taken = {Path(prefix).resolve() for prefix in inputs}
    for output in outputs:
        if Path(output).resolve() in taken:
            raise ConfigError(f"{output}: named more than once, or also an input; give each output a different name")
        taken.add(Path(output).resolve())


def _write(parts: Sequence[DocumentRange], output: str | Path) -> WrittenShard:
    sequences = [slice(int(shard.documents[first]), int(shard.documents[end])) for shard, first, end in parts]
    total = sum(run.stop - run.start for run in sequences)
    _check_total(total, output)
    documents: list[tuple[Any, int]] = [(np.zeros(1, np.int64), 0)]
    position = 0
    for part, run in zip(parts, sequences, strict=True):
        documents.append((part.shard.documents[part.first + 1 : part.end + 1], position - run.start))
        position += run.stop - run.start
    lengths = [part.shard.lengths[run] for part, run in zip(parts, sequences, strict=True)]
    ranges = [
        (p.shard.first_token(run.start), p.shard.first_token(run.stop)) for p, run in zip(parts, sequences, strict=True)
    ]
    num_documents, tokens = sum(part.end - part.first for part in parts), sum(end - start for start, end in ranges)
    written = WrittenShard(str(output), num_documents, total, tokens)
    manifest, path = _manifest(parts), bin_path(output)
    with open_temporary(path) as file, ExitStack() as discard:
        discard.callback(temporary_name(path).unlink, missing_ok=True)
        masked = any(part.shard.label_mask is not None for part in parts)
        mask, blocks = _mask_writer(output, discard) if masked else None, BlockHasher()
        for part, (start, end) in zip(parts, ranges, strict=True):
            _copy(part.shard, start, end, file, path, mask, blocks)
        publish_shard(Path(output), file, parts[0].shard.dtype, lengths, documents, manifest, mask, blocks)
        discard.pop_all()
    return written


def _manifest(parts: Sequence[DocumentRange]) -> dict[str, Any]:
    """Entries of the new shard's manifest: the tokenizer, if those of all parts are known, and the parts.

    Raises:
        DataError: their tokenizers differ, or a label mask is missing.
    """
    entries = {"parts": [[str(part.shard.prefix), part.first, part.end] for part in parts]}
    found: list[ShardTokenizer] = []
    manifests = [read_manifest(part.shard) for part in parts]
    for part, manifest in zip(parts, manifests, strict=True):
        if manifest is None or manifest.tokenizer is None:
            return entries
        found.append(manifest.tokenizer)
        if manifest.tokenizer.digest != found[0].digest:
            raise DataError(
                f"{manifest_path(part.shard.prefix)}: made by the tokenizer with sha256 {manifest.tokenizer.digest}, "
                f"but {parts[0].shard.prefix} by {found[0].digest}; merge shards of one tokenizer"
            )
    return {"tokenizer": found[0].entry, **entries}
