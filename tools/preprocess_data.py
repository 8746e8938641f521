"""Turns jsonl and plain text into Megatron token shards, with Megatron's flag names."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from megalin.data import corpus, preprocessing
from megalin.data.tokenizer import BYTES
from megalin.errors import ConfigError, MegalinError


def main(arguments: list[str] | None = None) -> int:
    """Runs the tool; the exit code is 0, or the one of the error that is printed."""
    try:
        _run(_parser().parse_args(arguments))
    except MegalinError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add(
        "--input", nargs="+", required=True, help="files or globs: .jsonl/.json (an object a line), .txt (one document)"
    )
    add("--json-keys", nargs="+", default=["text"], help="keys to take text from; each gives a shard")
    add("--output-prefix", required=True, help="shards are <prefix>_<key>_document.{bin,idx,manifest.json}")
    add("--tokenizer-type", choices=["HuggingFaceTokenizer", "ByteTokenizer"], default="HuggingFaceTokenizer")
    add("--tokenizer-model", help="path of the tokenizer.json for HuggingFaceTokenizer")
    add("--append-eod", action="store_true", help="end each document with <|endoftext|>")
    add("--workers", type=int, default=1, help="processes that tokenise; the output is the same for any number")
    add("--on-bad-line", choices=["skip", "fail"], default="skip", help="count and report bad lines, or stop at one")
    add("--max-document-bytes", type=int, default=corpus.DEFAULT_DOCUMENT_BYTES, help="limit of a line or text file")
    add("--log-interval", type=int, default=10_000, help="documents between two lines of progress, off a terminal")
    return parser


def _run(args: argparse.Namespace) -> None:
    byte_level = args.tokenizer_type == "ByteTokenizer"
    if byte_level == (args.tokenizer_model is not None):
        rule = "takes no --tokenizer-model" if byte_level else "needs --tokenizer-model, the path of a tokenizer.json"
        raise ConfigError(f"--tokenizer-type {args.tokenizer_type} {rule}")
    if args.log_interval < 1:
        raise ConfigError(f"--log-interval {args.log_interval}: at least 1 is needed")
    paths = corpus.expand_inputs(args.input)
    options = preprocessing.PreprocessOptions(
        json_keys=args.json_keys,
        output_prefix=args.output_prefix,
        tokenizer=BYTES if byte_level else args.tokenizer_model,
        append_eod=args.append_eod,
        workers=args.workers,
        on_bad_line=args.on_bad_line,
        limit_bytes=args.max_document_bytes,
    )
    console = Console(stderr=True)
    if console.is_terminal:
        report = _with_bar(console, paths, options)
    else:
        report = preprocessing.preprocess(paths, options, on_progress=_every(args.log_interval))
    for bad in report.listed:
        print(f"bad line: {bad}", file=sys.stderr)
    for kind, count in report.bad_lines.items():
        print(f"left out: {count} x {kind}", file=sys.stderr)
    print(f"{report.documents} documents, {report.tokens} tokens: {', '.join(report.prefixes)}")


def _with_bar(
    console: Console, paths: list, options: preprocessing.PreprocessOptions
) -> preprocessing.PreprocessReport:
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        total = sum(path.stat().st_size for path in paths)
        task = progress.add_task("tokenising", total=total)

        def show(state: preprocessing.Progress) -> None:
            text = f"{state.documents} documents, {state.tokens} tokens, {state.bad_lines} bad lines"
            progress.update(task, completed=state.read_bytes, description=text)

        report = preprocessing.preprocess(paths, options, on_progress=show)
        progress.update(task, completed=total)
    return report


def _every(interval: int) -> Callable[[preprocessing.Progress], None]:
    shown = 0

    def show(state: preprocessing.Progress) -> None:
        nonlocal shown
        if state.documents // interval > shown:
            shown = state.documents // interval
            print(f"{state.documents} documents, {state.tokens} tokens, {state.bad_lines} bad lines", file=sys.stderr)

    return show


if __name__ == "__main__":
    sys.exit(main())
