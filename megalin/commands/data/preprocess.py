"""`megalin data preprocess`: text tokenized into Megatron token shards."""

from __future__ import annotations

import argparse
import os
import sys
import traceback

from megalin.data.corpus import inputs
from megalin.data.corpus.parts import PartSubset
from megalin.data.corpus.progress import shown_progress
from megalin.data.shards import tokenization
from megalin.data.tokenizers.tokenizer import TokenizerFiles, TokenizerKind
from megalin.errors import ConfigError
from megalin.optional import require
from megalin.terminal_output import exit_code

# Megatron's names, with the files that each needs.
TOKENIZERS: dict[str, tuple[TokenizerKind, tuple[str, ...]]] = {
    "HuggingFaceTokenizer": ("huggingface", ("tokenizer_model",)),
    "GPT2BPETokenizer": ("gpt2", ("vocab_file", "merge_file")),
    "SentencePieceTokenizer": ("sentencepiece", ("tokenizer_model",)),
    "GPTSentencePieceTokenizer": ("sentencepiece", ("tokenizer_model",)),
    "TikTokenizer": ("tiktoken", ("tokenizer_model",)),
    "ByteTokenizer": ("bytes", ()),
}
# Environment variables with the number of processes under mpirun of Open MPI, MPICH and MVAPICH.
_MPI_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")


def run(args: argparse.Namespace) -> int:
    """Runs the command, under mpirun on all its ranks, and returns the exit code."""
    if args.shard is None and any(int(os.environ.get(name, "1")) > 1 for name in _MPI_SIZES):
        return _run_under_mpi(args)
    _preprocess(args, None if args.shard is None else _subset(args.shard), resume=args.resume)
    return 0


def _tokenizer(args: argparse.Namespace) -> TokenizerFiles:
    kind, needed = TOKENIZERS[args.tokenizer_type]
    for name in ("tokenizer_model", "vocab_file", "merge_file"):
        if (name in needed) != (getattr(args, name) is not None):
            verb = "needs" if name in needed else "takes no"
            raise ConfigError(f"--tokenizer-type {args.tokenizer_type} {verb} --{name.replace('_', '-')}")
    if args.tiktoken_pattern and kind != "tiktoken":
        raise ConfigError(f"--tokenizer-type {args.tokenizer_type} takes no --tiktoken-pattern")
    files = tuple(getattr(args, name) for name in needed)
    tokenizer = TokenizerFiles(kind, files, args.tiktoken_pattern, args.eod_token, args.special_tokens)
    if args.special_tokens and kind != "huggingface" and not tokenizer.load().special.before:
        raise ConfigError(f"--special-tokens: {tokenizer} has no token that begins a text; leave it out")
    return tokenizer


def _subset(text: str) -> PartSubset:
    number, _, total = text.partition("/")
    if not (number.isdecimal() and total.isdecimal()):
        raise ConfigError(f"--shard {text}: give I/N, as 0/8 to 7/8")
    return PartSubset(int(number), int(total))


def _run_under_mpi(args: argparse.Namespace) -> int:
    """Each rank processes its subset of the parts; the first merges them once none has failed.

    An unexpected error aborts all ranks, which would otherwise wait for this one forever.
    """
    world = require("mpi4py.MPI", "more than one process under mpirun", extra="mpi").COMM_WORLD
    rank, size = world.Get_rank(), world.Get_size()
    try:
        code = max(world.allgather(exit_code(lambda: _preprocess(args, PartSubset(rank, size), resume=args.resume))))
        if rank == 0 and code == 0:
            code = exit_code(lambda: _preprocess(args, None, resume=True))
        return int(world.bcast(code))
    except BaseException:
        traceback.print_exc()
        world.Abort(1)
        raise


def _preprocess(args: argparse.Namespace, subset: PartSubset | None, *, resume: bool) -> None:
    options = tokenization.PreprocessOptions(
        json_keys=args.json_keys,
        prompt_key=args.prompt_key,
        output_prefix=args.output_prefix,
        tokenizer=_tokenizer(args),
        append_eod=args.append_eod,
        workers=args.workers,
        on_bad_line=args.on_bad_line,
        limit_bytes=args.max_document_bytes,
        resume=resume,
        subset=subset,
    )
    paths = inputs.expand_inputs(args.input)
    total_bytes = sum(path.stat().st_size for path in paths) // (1 if subset is None else max(subset.total, 1))
    # Under mpirun the first rank's progress stands for all.
    shown = subset is None or subset.number == 0 or args.shard is not None
    with shown_progress("tokenising", total_bytes, interval=args.log_interval, shown=shown) as report_progress:
        report = tokenization.preprocess(paths, options, on_progress=report_progress)
    if report is None:
        if args.shard is not None:
            print(f"shard {args.shard} is done; after the last one, run again with --resume and without --shard")
        return
    for bad in report.listed:
        print(f"bad line: {bad}", file=sys.stderr)
    for kind, count in report.bad_lines.items():
        print(f"left out: {count} x {kind}", file=sys.stderr)
    labels = "" if report.label_tokens is None else f", {report.label_tokens} of them labels"
    print(f"{report.documents} documents, {report.tokens} tokens{labels}: {', '.join(report.prefixes)}")
