"""Command-line arguments shared by the tools that write a corpus from a corpus."""

from __future__ import annotations

import argparse

from megalin.data.corpus.documents import DEFAULT_DOCUMENT_BYTES

_FORMATS = ".jsonl/.json (an object per line), .txt (one document), each also .gz or .zst; .parquet"


def corpus_parser(description: str | None, *, workers: str = "processes") -> argparse.ArgumentParser:
    """Parser with the arguments for input, output and processes.

    Args:
        workers: help text of --workers.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--input", nargs="+", required=True, help=f"files, globs or @FILE with one of them per line: {_FORMATS}")
    add("--json-key", default="text", help="key or column of the text")
    add("--output-prefix", required=True, help="prefix of all files written, as <prefix>-00000-of-00025.jsonl")
    add("--compress", choices=["none", "gz", "zst"], default="none", help="compression of the files written")
    add("--workers", type=int, default=1, help=f"{workers}; the output is the same for any number")
    add("--resume", action="store_true", help="keep the finished parts of an interrupted run")
    add("--max-document-bytes", type=int, default=DEFAULT_DOCUMENT_BYTES, help="largest line or text file")
    add("--log-interval", type=int, default=100_000, help="documents between progress lines, if not on a terminal")
    return parser
