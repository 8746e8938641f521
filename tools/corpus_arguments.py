"""The arguments that the tools share that turn one corpus into another."""

from __future__ import annotations

import argparse

from megalin.data.corpus.documents import DEFAULT_DOCUMENT_BYTES

_FORMATS = ".jsonl/.json (an object a line), .txt (one document), each also .gz or .zst; .parquet"


def corpus_parser(description: str | None, *, workers: str = "processes") -> argparse.ArgumentParser:
    """A parser with the arguments that say which documents are read, where they go, and how.

    Args:
        workers: what --workers counts, for its help.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--input", nargs="+", required=True, help=f"files, globs or @FILE with one of them a line: {_FORMATS}")
    add("--json-key", default="text", help="key or column of the text")
    add("--output-prefix", required=True, help="files are <prefix>-00000-of-00025.jsonl, and others with this prefix")
    add("--compress", choices=["none", "gz", "zst"], default="none", help="of the files written")
    add("--workers", type=int, default=1, help=f"{workers}; the output is the same for any number")
    add("--resume", action="store_true", help="keep what a run that was stopped had finished")
    add("--max-document-bytes", type=int, default=DEFAULT_DOCUMENT_BYTES, help="limit of a line or text file")
    add("--log-interval", type=int, default=100_000, help="documents between two lines of progress, off a terminal")
    return parser
