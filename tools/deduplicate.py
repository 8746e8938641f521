"""Removes duplicates from a corpus: documents or lines that are equal, or similar by MinHash."""

from __future__ import annotations

import argparse
import sys

from corpus_arguments import corpus_parser

from megalin.data.corpus import deduplication, inputs
from megalin.data.corpus.progress import shown_progress
from megalin.data.corpus.signatures import scheme
from megalin.errors import exit_code


def main(arguments: list[str] | None = None) -> int:
    """Runs the tool; returns 0, or the exit code of the printed error."""
    args = _parser().parse_args(arguments)
    return exit_code(lambda: _run(args))


def _parser() -> argparse.ArgumentParser:
    parser = corpus_parser(__doc__)
    add = parser.add_argument
    add("--level", choices=["document", "line"], default="document", help="unit that is compared and removed")
    add(
        "--method",
        choices=["exact", "minhash"],
        default="minhash",
        help="exact: equal except white space; minhash: similar",
    )
    add("--threshold", type=float, default=0.7, help="least Jaccard index of five-word shingles of similar texts")
    add("--least-characters", type=int, default=20, help="least characters of a compared line; shorter lines are kept")
    add("--memory", type=int, default=1024, help="MiB that a worker may use to match texts")
    return parser


def _run(args: argparse.Namespace) -> None:
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


if __name__ == "__main__":
    sys.exit(main())
