"""What the tools that turn one corpus into another share: their arguments, and how they end."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

from megalin.data.corpus import DEFAULT_DOCUMENT_BYTES
from megalin.errors import MegalinError

_FORMATS = ".jsonl/.json (an object a line), .txt (one document), each also .gz or .zst; .parquet"


def corpus_parser(description: str | None, *, log_interval: int = 100_000) -> argparse.ArgumentParser:
    """A parser with the arguments that say which documents are read, where they go, and how.

    Args:
        log_interval: default of --log-interval, in documents.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--input", nargs="+", required=True, help=f"files, globs or @FILE with one of them a line: {_FORMATS}")
    add("--json-key", default="text", help="key or column of the text")
    add("--output-prefix", required=True, help="files are <prefix>-00000-of-00025.jsonl, and others with this prefix")
    add("--compress", choices=["none", "gz", "zst"], default="none", help="of the files written")
    add("--workers", type=int, default=1, help="processes; the output is the same for any number")
    add("--resume", action="store_true", help="keep what a run that was stopped had finished")
    add("--max-document-bytes", type=int, default=DEFAULT_DOCUMENT_BYTES, help="limit of a line or text file")
    add(
        "--log-interval", type=int, default=log_interval, help="documents between two lines of progress, off a terminal"
    )
    return parser


def exit_code(run: Callable[[], None]) -> int:
    """Runs a tool: 0, or the exit code of the user's error, which it prints."""
    try:
        run()
    except MegalinError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0
