"""`megalin data import-tokens`: token files of nanoGPT, llm.c, NumPy and datatrove as a Megatron shard."""

from __future__ import annotations

import argparse
from pathlib import Path

from megalin.data.corpus.progress import shown_progress
from megalin.data.shards.importing import Boundaries, import_tokens
from megalin.data.tokenizers.tokenizer import load_tokenizer
from megalin.errors import ConfigError

_PROGRESS_INTERVAL = 100_000
"""Documents between lines off a terminal."""


def run(args: argparse.Namespace) -> int:
    """Runs the command and returns the exit code."""
    if args.tokenizer_model is not None and args.vocab_size is not None:
        raise ConfigError("--vocab-size has no effect with --tokenizer-model, which has its own; leave one out")
    if args.vocab_size is not None and not 1 <= args.vocab_size <= 2**31:
        raise ConfigError(f"--vocab-size {args.vocab_size}: must be from 1 to 2^31")
    tokenizer = None
    if args.tokenizer_model is not None:
        tokenizer = (args.tokenizer_model, load_tokenizer(args.tokenizer_model))
    paths, boundaries = [Path(name) for name in args.input], _boundaries(args)
    total_bytes = sum(path.stat().st_size for path in paths if path.is_file())
    with shown_progress("importing", total_bytes, interval=_PROGRESS_INTERVAL) as report_progress:
        written = import_tokens(
            paths,
            Path(args.output_prefix),
            boundaries=boundaries,
            form=args.format,
            dtype=args.dtype,
            tokenizer=tokenizer,
            vocab_size=args.vocab_size,
            on_progress=report_progress,
        )
    print(
        f"{args.output_prefix}: {written.documents} documents, {written.tokens} tokens ({', '.join(written.formats)})"
    )
    return 0


def _boundaries(args: argparse.Namespace) -> Boundaries | None:
    for option, kind, token in (("--eod-id", "end", args.eod_id), ("--bos-id", "start", args.bos_id)):
        if token is not None:
            if token < 0:
                raise ConfigError(f"{option} {token}: must be a token id, at least 0")
            return Boundaries("end" if kind == "end" else "start", token)
    return Boundaries("file") if args.one_document else None
