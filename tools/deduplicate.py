"""Leaves out of a corpus what came before: documents or lines that are equal, or alike by MinHash."""

from __future__ import annotations

import argparse
import sys

from megalin.data import corpus, deduplication, inputs
from megalin.data.progress import shown_progress
from megalin.data.signatures import scheme
from megalin.errors import MegalinError


def main(arguments: list[str] | None = None) -> int:
    """Runs the tool; the exit code is 0, or the one of the error that is printed."""
    args = _parser().parse_args(arguments)
    try:
        _run(args)
    except MegalinError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    formats = ".jsonl/.json (an object a line), .txt (one document), each also .gz or .zst; .parquet"
    add("--input", nargs="+", required=True, help=f"files, globs or @FILE with one of them a line: {formats}")
    add("--json-key", default="text", help="key or column of the text")
    add("--output-prefix", required=True, help="files are <prefix>-00000-of-00025.jsonl, and <prefix>.manifest.json")
    add("--compress", choices=["none", "gz", "zst"], default="none", help="of the files written")
    add("--level", choices=["document", "line"], default="document", help="what is compared and left out")
    add("--method", choices=["exact", "minhash"], default="minhash", help="equal but for white space, or alike")
    add("--threshold", type=float, default=0.7, help="Jaccard index of five-word runs from which texts are alike")
    add("--least-characters", type=int, default=20, help="of a line that is compared; shorter ones stay")
    add("--workers", type=int, default=1, help="processes; the output is the same for any number")
    add("--memory", type=int, default=1024, help="MiB that a worker may use to join texts")
    add("--resume", action="store_true", help="keep what a run that was stopped had finished")
    add("--max-document-bytes", type=int, default=corpus.DEFAULT_DOCUMENT_BYTES, help="limit of a line or text file")
    add("--log-interval", type=int, default=100_000, help="documents between two lines of progress, off a terminal")
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
    with shown_progress("deduplicating", total_bytes, interval=args.log_interval) as tell:
        report = deduplication.deduplicate(paths, options, on_progress=tell)
    for kind, count in report.bad_lines.items():
        print(f"left out: {count} x {kind}", file=sys.stderr)
    print(
        f"{report.written_documents} of {report.documents} documents; {report.removed_texts} of {report.texts} "
        f"{args.level}s and {report.removed_bytes} bytes left out: {len(report.files)} files"
    )


if __name__ == "__main__":
    sys.exit(main())
