"""Cleaning of a corpus by rules, with counts and examples for each rule; order and other JSON fields stay."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megalin.data.corpus.batches import batches
from megalin.data.corpus.documents import Document, Reader
from megalin.data.corpus.jsonl_output import Compression, JsonLinesWriter, check_free, part_path, publish_parts
from megalin.data.corpus.parts import CorpusPart, CorpusProgress, ReportProgress, Run, plan, records, run_parts
from megalin.data.corpus.rules import RULES, Languages, apply_rule
from megalin.errors import ConfigError

_EXAMPLES = 5  # of a rule
_SHOWN_CHARACTERS = 80
_CONTEXT_CHARACTERS = 20


class CleanOptions(NamedTuple):
    """Options of `clean`."""

    json_key: str  # the text; other fields of an object stay unchanged
    output_prefix: str
    rules: Sequence[str]  # of `cleaning.RULES`
    preserve_markup: bool  # leave Markdown and LaTeX unchanged
    languages: Sequence[str]  # codes to keep; empty: all
    least_characters: int  # of a document after the rules; a shorter one is dropped
    compression: Compression
    workers: int
    limit_bytes: int  # of a line or text file
    resume: bool


class Example(NamedTuple):
    """Example of a change by a rule."""

    path: str
    line: int  # from the start of the part of the file, which is the file's own line number for a file of one part
    before: str
    after: str


class RuleReport(NamedTuple):
    """Effect of one rule."""

    documents: int  # changed
    removed_bytes: int  # negative if it added some
    examples: list[Example]


class CleanReport(NamedTuple):
    """Counts of documents read, changed and written."""

    files: list[str]
    documents: int
    written_documents: int
    other_language: int  # documents dropped
    too_short: int  # documents dropped
    rules: dict[str, RuleReport]
    bad_lines: dict[str, int]  # by kind


class _Job(NamedTuple):
    key: str
    rules: Sequence[str]
    preserve_markup: bool
    languages: Sequence[str]
    least_characters: int
    compression: Compression
    limit_bytes: int


def clean(
    paths: Sequence[Path], options: CleanOptions, *, on_progress: Callable[[CorpusProgress], None] = lambda _: None
) -> CleanReport:
    """Writes the cleaned corpus to `<output_prefix>-00000-of-00025.jsonl`, and a manifest with the effect of each rule.

    The result depends on the inputs and the rules alone; 1 MiB of documents is in memory at a time.

    Raises:
        ConfigError: unknown rules or languages; a corpus of this name exists; a library is missing.
        DataError: a file cannot be read; a worker died; the parts are of another corpus or other options.
        StorageError: the output cannot be written.
    """
    unknown = [rule for rule in options.rules if rule not in RULES]
    if unknown:
        raise ConfigError(f"--rules {' '.join(unknown)}: no such rule; choose from {', '.join(RULES)}")
    check_free(options.output_prefix, resume=options.resume)
    if options.languages:
        _languages(tuple(options.languages))  # raises for a bad one before workers start
    job = _Job(
        options.json_key,
        [rule for rule in RULES if rule in options.rules],
        options.preserve_markup,
        list(options.languages),
        options.least_characters,
        options.compression,
        options.limit_bytes,
    )
    folder, parts = Path(f"{options.output_prefix}.parts"), plan(paths)
    run_parts(_clean_part, job, parts, Run(folder, job._asdict(), options.workers, options.resume, None, on_progress))
    report = _report(folder, parts, job)
    rules = {name: rule._asdict() for name, rule in report.rules.items()}
    manifest = {**report._asdict(), "rules": rules, "settings": job._asdict()}
    return report._replace(files=publish_parts(options.output_prefix, folder, parts, options.compression, manifest))


def _report(folder: Path, parts: Sequence[CorpusPart], job: _Job) -> CleanReport:
    counts: Counter[str] = Counter()
    bad_lines: Counter[str] = Counter()
    rules = {name: RuleReport(0, 0, []) for name in job.rules}
    for record in records(folder, parts):
        counts.update(record["counts"])
        bad_lines.update(record["bad_lines"])
        for name, (documents, removed, examples) in record["rules"].items():
            sums = rules[name]
            more = [Example(*example) for example in examples[: _EXAMPLES - len(sums.examples)]]
            rules[name] = RuleReport(sums.documents + documents, sums.removed_bytes + removed, sums.examples + more)
    return CleanReport(
        files=[],
        documents=counts["documents"],
        written_documents=counts["written_documents"],
        other_language=counts["other_language"],
        too_short=counts["too_short"],
        rules=rules,
        bad_lines=dict(sorted(bad_lines.items())),
    )


@functools.lru_cache(maxsize=1)
def _languages(codes: tuple[str, ...]) -> Languages:
    return Languages(list(codes))


def _clean_part(job: _Job, part: CorpusPart, folder: Path, report: ReportProgress) -> Mapping[str, Any]:
    """Writes the cleaned documents of a part."""
    languages = _languages(tuple(job.languages)) if job.languages else None
    counts: Counter[str] = Counter()
    bad_lines: Counter[str] = Counter()
    rules = {name: RuleReport(0, 0, []) for name in job.rules}
    reader = Reader(part.span, [job.key], limit_bytes=job.limit_bytes)
    with JsonLinesWriter(part_path(folder, part, job.compression), job.compression) as writer:
        for batch in batches(reader):
            bad_lines.update(line.kind for line in batch.bad_lines)
            counts["documents"] += len(batch.documents)
            for document in batch.documents:
                text = _apply(document, job, part, rules)
                if len(text) < max(job.least_characters, 1):
                    counts["too_short"] += 1
                elif languages is not None and not languages.keeps(text):
                    counts["other_language"] += 1
                else:
                    writer.write({**document.fields, job.key: text})
                    counts["written_documents"] += 1
            report(CorpusProgress(len(batch.documents), 0, batch.read_bytes, len(batch.bad_lines)))
    return {"counts": counts, "bad_lines": bad_lines, "rules": rules}


def _apply(document: Document, job: _Job, part: CorpusPart, rules: dict[str, RuleReport]) -> str:
    """Applies all rules to the text; adds their effects to `rules`."""
    text = document.texts[0]
    for name in job.rules:
        changed = apply_rule(name, text, preserve_markup=job.preserve_markup)
        if changed != text:
            sums = rules[name]
            if len(sums.examples) < _EXAMPLES:
                sums.examples.append(_example(part.span.path, document.line, text, changed))
            removed = len(text.encode("utf-8")) - len(changed.encode("utf-8"))
            rules[name] = RuleReport(sums.documents + 1, sums.removed_bytes + removed, sums.examples)
            text = changed
    return text


def _example(path: str, line: int, before: str, after: str) -> Example:
    """Example at the first difference of the texts, with some context before it."""
    pairs = enumerate(zip(before, after, strict=False))
    same = next((k for k, (one, other) in pairs if one != other), min(len(before), len(after)))
    start = max(same - _CONTEXT_CHARACTERS, 0)
    return Example(path, line, before[start:][:_SHOWN_CHARACTERS], after[start:][:_SHOWN_CHARACTERS])
