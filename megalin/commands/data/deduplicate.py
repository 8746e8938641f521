"""`megalin data deduplicate`: a corpus without equal or similar documents or lines."""

from __future__ import annotations

import argparse
import sys

from megalin.data.corpus import deduplication, inputs
from megalin.data.corpus.jsonl_output import check_free
from megalin.data.corpus.progress import shown_progress
from megalin.data.corpus.signatures import scheme


def run(args: argparse.Namespace) -> int:
    """Runs the command and returns the exit code."""
    options = deduplication.DeduplicateOptions(
        json_key=args.json_key,
        output_prefix=args.output_prefix,
        level=args.level,
        how=scheme(args.method, args.threshold),
        least_characters=args.least_characters,
        compression=args.compress,
        workers=args.workers,
        memory_bytes=args.memory << 20,
        limit_bytes=args.max_document_bytes,
        resume=args.resume,
    )
    check_free(args.output_prefix, resume=args.resume)
    paths = inputs.expand_inputs(args.input)
    total_bytes = sum(path.stat().st_size for path in paths)
    report = deduplication.deduplicate(
        paths, options, show=lambda name: shown_progress(name, total_bytes, interval=args.log_interval)
    )
    for kind, count in report.bad_lines.items():
        print(f"left out: {count} x {kind}", file=sys.stderr)
    print(
        f"{report.written_documents} of {report.documents} documents; {report.removed_texts} of {report.texts} "
        f"{args.level}s and {report.removed_bytes} bytes left out: {len(report.files)} files"
    )
    return 0
