"""Selection of documents by perplexity: the threshold, the selected corpus, and a page of samples for review."""

from __future__ import annotations

import hashlib
import heapq
import html
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from megalin.data.corpus.batches import batches
from megalin.data.corpus.documents import Reader
from megalin.data.corpus.jsonl_output import Compression, JsonLinesWriter, part_path, publish_parts
from megalin.data.corpus.parts import CorpusPart, CorpusProgress, ReportProgress, Run, records, run_parts
from megalin.errors import ConfigError, DataError
from megalin.files import write_text

_SHOWN_CHARACTERS = 2000
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Documents by perplexity</title>
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<style>
body {{ font: 15px/1.5 sans-serif; max-width: 60em; margin: 2em auto; padding: 0 1em }}
article {{ border-left: 4px solid #999; padding-left: 1em; margin: 1.5em 0 }}
article.kept {{ border-color: #2a7 }} article.left {{ border-color: #c33 }}
pre {{ white-space: pre-wrap; overflow-wrap: anywhere; background: #f5f5f5; padding: .7em }}
</style></head><body>
<h1>Documents by perplexity</h1>
<p>{summary}</p>
{articles}
</body></html>
"""


class SelectOptions(NamedTuple):
    """Options of `select`; exactly one of the first two is set."""

    max_perplexity: float | None
    keep_quantile: float | None  # fraction of the documents, those with the lowest perplexity
    json_key: str
    output_prefix: str
    compression: Compression
    workers: int
    limit_bytes: int  # of a line or text file
    samples: int  # on the page, for each of kept and dropped
    seed: int  # of the sample


class Sample(NamedTuple):
    """A document on the review page."""

    order: str  # hash of seed and position: the smallest are taken, so the sample does not depend on workers
    kept: bool
    perplexity: float
    path: str
    line: int  # from the start of the part of the file, which is the file's own line number for a file of one part
    text: str


class SelectReport(NamedTuple):
    """Counts of documents scored and kept."""

    files: list[str]
    documents: int
    kept_documents: int
    max_perplexity: float
    bad_lines: dict[str, int]  # by kind
    page: str


class _Job(NamedTuple):
    scores: str  # folder of the scores
    max_perplexity: float
    key: str
    compression: Compression
    limit_bytes: int
    samples: int
    seed: int


def check_selection(options: SelectOptions) -> None:
    """Validates the options. Raises ConfigError."""
    perplexity, quantile = options.max_perplexity, options.keep_quantile
    if (perplexity is None) == (quantile is None):
        raise ConfigError("give either --max-perplexity or --keep-quantile")
    if perplexity is not None and not 0 < perplexity < math.inf:
        raise ConfigError(f"--max-perplexity {perplexity}: must be positive and finite")
    if quantile is not None and not 0 < quantile <= 1:
        raise ConfigError(f"--keep-quantile {quantile}: must be above 0 and at most 1")
    if options.samples < 0:
        raise ConfigError(f"--samples {options.samples}: must be at least 0")


def scores_path(folder: Path, number: int) -> Path:
    """Path of the scores of a part, float64 [n, 2]: for each document the sum of the losses in nats, and the tokens."""
    return folder / f"{number:06}.scores"


def read_perplexities(folder: Path, number: int) -> npt.NDArray[np.float64]:
    """Perplexities [n], exp(sum / tokens); infinite for a document without a token."""
    sums, tokens = np.fromfile(scores_path(folder, number), np.float64).reshape(-1, 2).T
    with np.errstate(over="ignore"):
        return np.exp(np.divide(sums, tokens, out=np.full(len(sums), np.inf), where=tokens > 0))


def select(
    parts: Sequence[CorpusPart],
    scores: Path,
    options: SelectOptions,
    *,
    on_progress: Callable[[CorpusProgress], None] = lambda _: None,
) -> SelectReport:
    """Writes the documents up to the threshold, each with its "perplexity", a manifest, and a page of samples.

    Memory: 8 bytes a document of the corpus while the threshold of a quantile is computed.

    Raises:
        DataError: no document has a token, a file cannot be read, or a worker died.
        StorageError: the output cannot be written.
    """
    check_selection(options)
    bound = _bound(parts, scores, options)
    job = _Job(
        str(scores),
        bound,
        options.json_key,
        options.compression,
        options.limit_bytes,
        options.samples,
        options.seed,
    )
    folder = scores.parent / "selected"
    run_parts(_select_part, job, parts, Run(folder, job._asdict(), options.workers, False, None, on_progress))
    counts: Counter[str] = Counter()
    bad_lines: Counter[str] = Counter()
    samples: dict[bool, list[Sample]] = {True: [], False: []}
    for record in records(folder, parts):
        counts.update(record["counts"])
        bad_lines.update(record["bad_lines"])
        for sample in (Sample(*values) for values in record["samples"]):
            samples[sample.kept].append(sample)
        samples = {kept: heapq.nsmallest(options.samples, found) for kept, found in samples.items()}
    report = SelectReport(
        files=[],
        documents=counts["documents"],
        kept_documents=counts["kept"],
        max_perplexity=bound,
        bad_lines=dict(sorted(bad_lines.items())),
        page=f"{options.output_prefix}.review.html",
    )
    write_text(Path(report.page), _review_page(report, [*samples[True], *samples[False]]))
    manifest = {**report._asdict(), "settings": job._asdict()}
    return report._replace(files=publish_parts(options.output_prefix, folder, parts, options.compression, manifest))


def _bound(parts: Sequence[CorpusPart], scores: Path, options: SelectOptions) -> float:
    if options.max_perplexity is not None:
        return options.max_perplexity
    assert options.keep_quantile is not None
    values = np.concatenate([read_perplexities(scores, part.number) for part in parts])
    values = values[np.isfinite(values)]
    if not values.size:
        raise DataError("empty corpus: no document has a token to score; check --input and --json-key")
    place = max(math.ceil(options.keep_quantile * values.size) - 1, 0)
    return float(np.partition(values, place)[place])


def _select_part(job: _Job, part: CorpusPart, folder: Path, report: ReportProgress) -> Mapping[str, Any]:
    """Writes a part's documents up to the threshold."""
    perplexities = read_perplexities(Path(job.scores), part.number).tolist()
    counts: Counter[str] = Counter()
    bad_lines: Counter[str] = Counter()
    samples: dict[bool, list[Sample]] = {True: [], False: []}
    reader = Reader(part.span, [job.key], limit_bytes=job.limit_bytes)
    with JsonLinesWriter(part_path(folder, part, job.compression), job.compression) as writer:
        for batch in batches(reader):
            bad_lines.update(line.kind for line in batch.bad_lines)
            first = counts["documents"]
            counts["documents"] += len(batch.documents)
            for document, perplexity in zip(batch.documents, perplexities[first : counts["documents"]], strict=True):
                kept = perplexity <= job.max_perplexity
                if kept:
                    counts["kept"] += 1
                    writer.write({**document.fields, "perplexity": round(perplexity, 4)})
                order = hashlib.blake2b(f"{job.seed} {part.number} {document.line}".encode(), digest_size=8).hexdigest()
                shown = document.texts[0][:_SHOWN_CHARACTERS]
                samples[kept].append(Sample(order, kept, perplexity, part.span.path, document.line, shown))
            samples = {kept: heapq.nsmallest(job.samples, found) for kept, found in samples.items()}
            report(CorpusProgress(len(batch.documents), 0, batch.read_bytes, len(batch.bad_lines)))
    assert counts["documents"] == len(perplexities), (part, counts, len(perplexities))
    return {"counts": counts, "bad_lines": bad_lines, "samples": [*samples[True], *samples[False]]}


def _review_page(report: SelectReport, samples: Sequence[Sample]) -> str:
    """Self-contained review page: it loads and runs nothing, and all text is escaped."""
    fraction = report.kept_documents / max(report.documents, 1)
    summary = (
        f"{report.kept_documents} of {report.documents} documents ({fraction:.1%}) have a perplexity of at most "
        f"{report.max_perplexity:.4g} and are kept; here are {len(samples)} drawn from both sides, by perplexity."
    )
    articles = "\n".join(
        f'<article class="{"kept" if sample.kept else "left"}"><h2>{"kept" if sample.kept else "left out"}: '
        f"{sample.perplexity:.4g}</h2><p>{_escaped(f'{sample.path}:{sample.line}')}</p>"
        f"<pre>{_escaped(sample.text)}</pre></article>"
        for sample in sorted(samples, key=lambda sample: sample.perplexity)
    )
    return _PAGE.format(summary=summary, articles=articles)


def _escaped(text: str) -> str:
    """Escapes text for HTML; unprintable characters become U+FFFD."""
    return html.escape("".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text))
