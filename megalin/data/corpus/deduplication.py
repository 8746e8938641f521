"""Deduplication of a corpus: texts are signed and clustered, and all but the first of a cluster are removed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from megalin.data.corpus.batches import batches
from megalin.data.corpus.documents import Document, Reader
from megalin.data.corpus.duplicates import DocumentIds, SignedPart, append_signatures, find_duplicates
from megalin.data.corpus.inputs import Span
from megalin.data.corpus.jsonl_output import Compression, JsonLinesWriter, check_free, part_path, publish_parts
from megalin.data.corpus.parts import CorpusPart, CorpusProgress, ReportProgress, Run, discard, plan, records, run_parts
from megalin.data.corpus.signatures import Scheme, sign
from megalin.errors import ConfigError
from megalin.files import open_temporary, publish, storage_errors

_TEXTS_AT_ONCE = 4096  # signed together
Level = Literal["document", "line"]
Show = Callable[[str], AbstractContextManager[Callable[[CorpusProgress], None]]]
"""Opens the progress display of a pass over the corpus, by the pass's name."""


class DeduplicateOptions(NamedTuple):
    """Options of `deduplicate`."""

    json_key: str  # the text; other fields of an object stay unchanged
    output_prefix: str
    level: Level  # unit that is compared and removed: documents or lines
    how: Scheme
    least_characters: int  # shorter lines are always kept
    compression: Compression
    workers: int
    memory_bytes: int  # of a worker while texts are clustered
    limit_bytes: int  # of a line or text file
    resume: bool


class DeduplicateReport(NamedTuple):
    """Counts of what was read, removed and written; `texts` are documents or lines, by the level."""

    files: list[str]
    documents: int
    written_documents: int
    texts: int
    removed_texts: int
    removed_bytes: int
    bad_lines: dict[str, int]  # by kind


class _Job(NamedTuple):
    key: str
    level: Level
    how: Scheme
    least_characters: int
    compression: Compression
    limit_bytes: int
    firsts: Sequence[int]  # of each part, the number of its first text; empty while texts are signed
    removed: str  # path of the numbers of the texts to remove, in ascending order


def deduplicate(
    paths: Sequence[Path], options: DeduplicateOptions, *, show: Show = lambda _: nullcontext(lambda _: None)
) -> DeduplicateReport:
    """Writes the corpus to `<output_prefix>-00000-of-00025.jsonl` and a manifest, keeping the first text of a cluster.

    A document that loses all its lines is removed. The result depends on the inputs and the comparison alone. Disk:
    8 bytes a band and the sketch for each text, that is 296 for MinHash at a threshold of 0.7. Memory: `memory_bytes`
    a worker, and 48 bytes a duplicate in each band. `show` is called with "signing" and with "writing".

    Raises:
        ConfigError: invalid options; a corpus of this name exists; a library is missing.
        DataError: a file cannot be read; a worker died; the parts are of another corpus or other options.
        StorageError: the output cannot be written.
    """
    if not 0 < options.how.threshold <= 1:
        raise ConfigError(f"--threshold {options.how.threshold}: must be above 0 and at most 1")
    if options.memory_bytes < 1 << 20:
        raise ConfigError(f"--memory {options.memory_bytes >> 20}: must be at least 1 MiB")
    check_free(options.output_prefix, resume=options.resume)
    folder, parts = Path(f"{options.output_prefix}.parts"), plan(paths)
    job = _Job(
        options.json_key,
        options.level,
        options.how,
        options.least_characters,
        options.compression,
        options.limit_bytes,
        firsts=(),
        removed=str(folder / "removed.npy"),
    )
    settings = {**job._asdict(), "removed": None}
    with show("signing") as report_progress:
        if folder.exists() and not options.resume:
            discard(folder)
        signing = Run(folder / "signatures", settings, options.workers, True, None, report_progress)
        run_parts(_sign_part, job, parts, signing)
    signed = _signed(signing.folder, parts)
    if not Path(job.removed).exists():
        removed = find_duplicates(signed, options.how, workers=options.workers, memory_bytes=options.memory_bytes)
        _save(Path(job.removed), removed)
    with show("writing") as report_progress:
        writing = signing._replace(folder=folder / "documents", on_progress=report_progress)
        run_parts(_filter_part, job._replace(firsts=[part.first for part in signed]), parts, writing)
    report = _report(writing.folder, parts, sum(sum(part.blocks) for part in signed))
    manifest = {**report._asdict(), "settings": settings}
    files = publish_parts(options.output_prefix, writing.folder, parts, options.compression, manifest)
    discard(folder)
    return report._replace(files=files)


def _save(path: Path, removed: DocumentIds) -> None:
    with open_temporary(path) as file:
        with storage_errors(path):
            np.save(file, removed, allow_pickle=False)
        publish(file, path)


def _signed(folder: Path, parts: Sequence[CorpusPart]) -> list[SignedPart]:
    signed, first = [], 0
    for part, record in zip(parts, records(folder, parts), strict=True):
        signed.append(SignedPart(folder / f"{part.number:06}", first, record["blocks"]))
        first += sum(record["blocks"])
    return signed


def _report(folder: Path, parts: Sequence[CorpusPart], texts: int) -> DeduplicateReport:
    counts: Counter[str] = Counter()
    bad_lines: Counter[str] = Counter()
    for record in records(folder, parts):
        counts.update(record["counts"])
        bad_lines.update(record["bad_lines"])
    return DeduplicateReport(
        files=[],
        documents=counts["documents"],
        written_documents=counts["written_documents"],
        texts=texts,
        removed_texts=counts["removed_texts"],
        removed_bytes=counts["removed_bytes"],
        bad_lines=dict(sorted(bad_lines.items())),
    )


def _texts(document: Document, job: _Job) -> list[str]:
    """Texts of a document that are compared."""
    text = document.texts[0]
    return [text] if job.level == "document" else [line for line in text.split("\n") if _counts(line, job)]


def _counts(line: str, job: _Job) -> bool:
    return len(line.strip()) >= job.least_characters


def _reader(span: Span, job: _Job) -> Reader:
    return Reader(span, [job.key], limit_bytes=job.limit_bytes)


def _sign_part(job: _Job, part: CorpusPart, folder: Path, report: ReportProgress) -> Mapping[str, Any]:
    """Writes the signatures of a part's texts."""
    prefix, blocks = folder / f"{part.number:06}", []
    with storage_errors(prefix):
        for suffix in ("bands", "sketches"):
            Path(f"{prefix}.{suffix}").write_bytes(b"")
    for batch in batches(_reader(part.span, job)):
        texts = [text for document in batch.documents for text in _texts(document, job)]
        for first in range(0, len(texts), _TEXTS_AT_ONCE):
            block = texts[first : first + _TEXTS_AT_ONCE]
            with storage_errors(prefix):
                append_signatures(prefix, sign(block, job.how))
            blocks.append(len(block))
        report(CorpusProgress(len(batch.documents), 0, batch.read_bytes, len(batch.bad_lines)))
    return {"blocks": blocks}


def _filter_part(job: _Job, part: CorpusPart, folder: Path, report: ReportProgress) -> Mapping[str, Any]:
    """Writes a part's documents without the removed texts."""
    number = job.firsts[part.number]
    removed = np.load(job.removed, mmap_mode="r", allow_pickle=False)
    end = job.firsts[part.number + 1] if part.number + 1 < len(job.firsts) else np.iinfo(np.int64).max
    mine = set(removed[slice(*np.searchsorted(removed, [number, end]))].tolist())
    counts: Counter[str] = Counter()
    bad_lines: Counter[str] = Counter()
    with JsonLinesWriter(part_path(folder, part, job.compression), job.compression) as writer:
        for batch in batches(_reader(part.span, job)):
            bad_lines.update(line.kind for line in batch.bad_lines)
            for document in batch.documents:
                texts = _texts(document, job)
                dropped = [k for k in range(len(texts)) if number + k in mine]
                number += len(texts)
                counts["documents"] += 1
                counts["removed_texts"] += len(dropped)
                counts["removed_bytes"] += sum(len(texts[k].encode("utf-8")) for k in dropped)
                text = _without(document.texts[0], set(dropped), job) if dropped else document.texts[0]
                if text is not None:
                    writer.write({**document.fields, job.key: text})
                    counts["written_documents"] += 1
            report(CorpusProgress(len(batch.documents), 0, batch.read_bytes, len(batch.bad_lines)))
    return {"counts": counts, "bad_lines": bad_lines}


def _without(text: str, dropped: set[int], job: _Job) -> str | None:
    """Removes these of the compared texts from a text; None where nothing is left."""
    if job.level == "document":
        return None
    kept, number = [], 0
    for line in text.split("\n"):
        if _counts(line, job):
            number += 1
            if number - 1 in dropped:
                continue
        kept.append(line)
    rest = "\n".join(kept)
    return rest if rest.strip() else None
