"""`megalin data clean`: a corpus cleaned by rules, and the effect of each."""

from __future__ import annotations

import argparse
import sys

from megalin.data.corpus import cleaning, inputs
from megalin.data.corpus.jsonl_output import check_free
from megalin.data.corpus.progress import shown_progress


def run(args: argparse.Namespace) -> int:
    """Runs the command and returns the exit code."""
    options = cleaning.CleanOptions(
        json_key=args.json_key,
        output_prefix=args.output_prefix,
        rules=args.rules,
        preserve_markup=not args.no_preserve_markup,
        languages=args.languages,
        least_characters=args.least_characters,
        compression=args.compress,
        workers=args.workers,
        limit_bytes=args.max_document_bytes,
        resume=args.resume,
    )
    check_free(args.output_prefix, resume=args.resume)
    paths = inputs.expand_inputs(args.input)
    total_bytes = sum(path.stat().st_size for path in paths)
    with shown_progress("cleaning", total_bytes, interval=args.log_interval) as report_progress:
        report = cleaning.clean(paths, options, on_progress=report_progress)
    for name, rule in report.rules.items():
        print(f"{name}: {rule.documents} documents, {rule.removed_bytes} bytes removed")
        for example in rule.examples[:1]:
            print(f"    {example.before!a} -> {example.after!a}")
    for kind, count in report.bad_lines.items():
        print(f"left out: {count} x {kind}", file=sys.stderr)
    left_out = f"{report.too_short} too short, {report.other_language} in other languages"
    print(f"{report.written_documents} of {report.documents} documents ({left_out}): {len(report.files)} files")
    return 0
