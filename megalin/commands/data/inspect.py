"""`megalin data inspect`: a summary of a token shard, or its defect in one line."""

from __future__ import annotations

import argparse
import json

from rich.console import Console
from rich.table import Table
from rich.text import Text

from megalin.data.shards.indexed_dataset import manifest_path
from megalin.data.shards.inspection import ShardSummary, digest_shard, inspect_shard, validate_shard
from megalin.data.tokenizers.tokenizer import load_tokenizer
from megalin.errors import ConfigError
from megalin.terminal_output import terminal


def run(args: argparse.Namespace) -> int:
    """Runs the command and returns the exit code."""
    tokenizer = load_tokenizer(args.tokenizer_model) if args.tokenizer_model else None
    if args.vocab_size is not None and not args.validate:
        raise ConfigError("--vocab-size has no effect without --validate; add --validate")
    if args.validate:
        vocab_size: int | None = args.vocab_size
        if vocab_size is None and tokenizer is not None:
            vocab_size = tokenizer.vocab_size
        if vocab_size is None or vocab_size < 1:
            raise ConfigError("--validate needs --vocab-size V of at least 1, or --tokenizer-model")
        validate_shard(args.prefix, vocab_size=vocab_size)
    stored = digest_shard(args.prefix) if args.digest else None
    summary = inspect_shard(args.prefix, tokenizer)
    if args.json:
        lengths = summary.lengths and summary.lengths._asdict()
        print(json.dumps({**summary._asdict(), "lengths": lengths, "validated": args.validate, "digests": stored}))
    else:
        _print(summary)
        if stored is not None:
            print(f"digests of all bytes: {stored}, {manifest_path(args.prefix)}")
        if args.validate:
            print(f"all {summary.tokens} token ids are below {vocab_size}")
    return 0


def _print(summary: ShardSummary) -> None:
    table = Table(show_header=False)
    for name, value in summary._asdict().items():
        if name == "lengths" and value is not None:
            value = ", ".join(f"{key} {number:g}" for key, number in value._asdict().items())
        if name == "label_fraction" and value is not None:
            value = f"{value:.2%}"
        if name == "first_tokens" and summary.first_text is not None:
            continue  # the text stands below; --json has both
        if value is not None:
            # Text, not markup: a corpus may contain brackets, and control characters must not reach the terminal.
            shown = value if name != "first_text" else "".join(c if c.isprintable() else repr(c)[1:-1] for c in value)
            table.add_row(name, Text(str(shown), overflow="fold"))
    Console(file=terminal()).print(table)
