"""Tokenizes jsonl, parquet and plain text into Megatron token shards, with Megatron's flag names."""

from __future__ import annotations

import argparse
import os
import sys
import traceback

from megalin.data.corpus import documents, inputs
from megalin.data.corpus.parts import PartSubset
from megalin.data.corpus.progress import shown_progress
from megalin.data.shards import tokenization
from megalin.data.tokenizers.tokenizer import TokenizerFiles
from megalin.errors import ConfigError, exit_code
from megalin.optional import require

# Megatron's names, with the files that each needs.
_TOKENIZERS = {
    "HuggingFaceTokenizer": ("huggingface", ("tokenizer_model",)),
    "GPT2BPETokenizer": ("gpt2", ("vocab_file", "merge_file")),
    "SentencePieceTokenizer": ("sentencepiece", ("tokenizer_model",)),
    "GPTSentencePieceTokenizer": ("sentencepiece", ("tokenizer_model",)),
    "TikTokenizer": ("tiktoken", ("tokenizer_model",)),
    "ByteTokenizer": ("bytes", ()),
}
# Environment variables with the number of processes under mpirun of Open MPI, MPICH and MVAPICH.
_MPI_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE")


def main(arguments: list[str] | None = None) -> int:
    """Runs the tool; returns 0, or the exit code of the printed error."""
    args = _parser().parse_args(arguments)
    if args.shard is None and any(int(os.environ.get(name, "1")) > 1 for name in _MPI_SIZES):
        return exit_code(lambda: _run_under_mpi(args))
    return exit_code(lambda: _run(args, None if args.shard is None else _subset(args.shard), resume=args.resume))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    formats = ".jsonl/.json (an object per line), .txt (one document), each also .gz or .zst; .parquet"
    add("--input", nargs="+", required=True, help=f"files, globs or @FILE with one of them per line: {formats}")
    add("--json-keys", nargs="+", default=["text"], help="keys or columns of text; each becomes a shard")
    add(
        "--prompt-key",
        help="supervised data: key of the text before each document; only the document's own tokens and its end count "
        "as labels (writes <prefix>_<key>_document.mask.bin)",
    )
    add("--output-prefix", required=True, help="writes <prefix>_<key>_document.{bin,idx,manifest.json}")
    add("--tokenizer-type", choices=[*_TOKENIZERS], default="HuggingFaceTokenizer")
    add("--tokenizer-model", help="local tokenizer.json or its folder, SentencePiece .model or .tiktoken file of ranks")
    add("--vocab-file", help="vocab.json of GPT2BPETokenizer")
    add("--merge-file", help="merges.txt of GPT2BPETokenizer")
    add("--tiktoken-pattern", default="", help="gpt2, cl100k or o200k, if not determined by the number of ranks")
    add("--append-eod", action="store_true", help="end each document with the end-of-document token")
    add("--eod-token", help="name of that token; else eos_token of the tokenizer's folder, or <|endoftext|>")
    add("--special-tokens", action="store_true", help="keep ids that tokenizer.json adds (BOS), as Megatron-LM does")
    add("--workers", type=int, default=1, help="tokenizing processes; the output is the same for any number")
    add("--shard", metavar="I/N", help="process part I of N only (from 0); finish with --resume without --shard")
    add("--resume", action="store_true", help="keep the finished parts of an interrupted run")
    add(
        "--on-bad-line",
        choices=["skip", "fail"],
        default="skip",
        help="skip: count and report bad lines; fail: stop at the first",
    )
    add("--max-document-bytes", type=int, default=documents.DEFAULT_DOCUMENT_BYTES, help="largest line or text file")
    add("--log-interval", type=int, default=10_000, help="documents between progress lines, if not on a terminal")
    return parser


def _tokenizer(args: argparse.Namespace) -> TokenizerFiles:
    kind, needed = _TOKENIZERS[args.tokenizer_type]
    for name in ("tokenizer_model", "vocab_file", "merge_file"):
        if (name in needed) != (getattr(args, name) is not None):
            verb = "needs" if name in needed else "takes no"
            raise ConfigError(f"--tokenizer-type {args.tokenizer_type} {verb} --{name.replace('_', '-')}")
    if args.tiktoken_pattern and kind != "tiktoken":
        raise ConfigError(f"--tokenizer-type {args.tokenizer_type} takes no --tiktoken-pattern")
    if args.eod_token is not None and kind not in ("huggingface", "sentencepiece"):
        raise ConfigError(f"--tokenizer-type {args.tokenizer_type} takes no --eod-token")
    if args.special_tokens and kind != "huggingface":
        raise ConfigError(f"--tokenizer-type {args.tokenizer_type} takes no --special-tokens")
    files = tuple(getattr(args, name) for name in needed)
    return TokenizerFiles(kind, files, args.tiktoken_pattern, args.eod_token, args.special_tokens)


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
        code = max(world.allgather(exit_code(lambda: _run(args, PartSubset(rank, size), resume=args.resume))))
        if rank == 0 and code == 0:
            code = exit_code(lambda: _run(args, None, resume=True))
        return int(world.bcast(code))
    except BaseException:
        traceback.print_exc()
        world.Abort(1)
        raise


def _run(args: argparse.Namespace, subset: PartSubset | None, *, resume: bool) -> None:
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


if __name__ == "__main__":
    sys.exit(main())
