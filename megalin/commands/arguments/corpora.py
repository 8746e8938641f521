"""Arguments of `megalin data` for text: train-tokenizer, preprocess, clean, deduplicate, score."""

from __future__ import annotations

import argparse
from pathlib import Path

from megalin.commands.arguments.choices import DOCUMENT_BYTES, DTYPES, RULES, TOKENIZERS
from megalin.commands.arguments.command import Command, Output

_FORMATS = ".jsonl/.json (an object per line), .txt (one document), each also .gz, .bz2, .xz, .zst; .parquet, .arrow"
_SAME_OUTPUT = "the output is the same for any number"


def _train_tokenizer(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--input",
        nargs="+",
        required=True,
        help="files, globs or @FILE: .jsonl, .txt, also .gz, .bz2, .xz, .zst; .parquet, .arrow",
    )
    add("--json-keys", nargs="+", default=["text"], help="keys of text; bad lines are counted and left out (text)")
    add("--vocab-size", type=int, required=True, help="vocabulary size, with the 256 bytes and <|endoftext|>")
    add("--special-tokens", nargs="+", default=[], help="tokens that never occur in text, as [CLS] [SEP] [MASK] [PAD]")
    add("--initial-alphabet", type=Path, help="UTF-8 file: its characters become single tokens; others remain bytes")
    add("--output", type=Path, required=True, help="path of the tokenizer.json")
    _add_document_limit(parser)


def _preprocess(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--input", nargs="+", required=True, help=f"files, globs or @FILE with one of them per line: {_FORMATS}")
    add("--json-keys", nargs="+", default=["text"], help="keys or columns of text; each becomes a shard (text)")
    add(
        "--prompt-key",
        help="supervised data: key of the text before each document; only the document's own tokens and its end count "
        "as labels (writes <prefix>_<key>_document.mask.bin)",
    )
    add("--output-prefix", required=True, help="writes <prefix>_<key>_document.{bin,idx,manifest.json}")
    add("--tokenizer-type", choices=TOKENIZERS, default=TOKENIZERS[0], help=f"kind of the tokenizer ({TOKENIZERS[0]})")
    add("--tokenizer-model", help="local tokenizer.json or its folder, SentencePiece .model or tiktoken file of ranks")
    add("--vocab-file", help="vocab.json of GPT2BPETokenizer")
    add("--merge-file", help="merges.txt of GPT2BPETokenizer")
    add("--tiktoken-pattern", default="", help="of ranks of no published vocabulary: gpt2, cl100k, o200k, llama3, qwen")
    add("--append-eod", action="store_true", help="end each document with the end-of-document token")
    add("--eod-token", help="text or id of that token (that of the tokenizer's files)")
    add(
        "--special-tokens",
        action="store_true",
        help="put the ids around texts that tokenizer.json adds, or BOS before them",
    )
    add("--workers", type=int, default=1, help=f"tokenizing processes (1); {_SAME_OUTPUT}")
    add("--shard", metavar="I/N", help="process part I of N only (from 0); finish with --resume without --shard")
    add("--resume", action="store_true", help="keep the finished parts of an interrupted run")
    add(
        "--on-bad-line",
        choices=["skip", "fail"],
        default="skip",
        help="skip: count and report bad lines; fail: stop at the first (skip)",
    )
    _add_limits(parser, log_interval=10_000)


def _add_document_limit(parser: argparse.ArgumentParser) -> None:
    text = f"largest line or text file ({DOCUMENT_BYTES})"
    parser.add_argument("--max-document-bytes", type=int, default=DOCUMENT_BYTES, help=text)


def _add_limits(parser: argparse.ArgumentParser, *, log_interval: int) -> None:
    _add_document_limit(parser)
    interval = f"documents between progress lines, if not on a terminal ({log_interval})"
    parser.add_argument("--log-interval", type=int, default=log_interval, help=interval)


def _add_corpus(parser: argparse.ArgumentParser, *, workers: str = "processes", log_interval: int = 100_000) -> None:
    """Adds the arguments of the commands that write a corpus from a corpus.

    Args:
        workers: help text of --workers.
    """
    add = parser.add_argument
    add("--input", nargs="+", required=True, help=f"files, globs or @FILE with one of them per line: {_FORMATS}")
    add("--json-key", default="text", help="key or column of the text (text)")
    add("--output-prefix", required=True, help="prefix of all files written, as <prefix>-00000-of-00025.jsonl")
    add("--compress", choices=["none", "gz", "zst"], default="none", help="compression of the files written (none)")
    add("--workers", type=int, default=1, help=f"{workers} (1); {_SAME_OUTPUT}")
    add("--resume", action="store_true", help="keep the finished parts of an interrupted run")
    _add_limits(parser, log_interval=log_interval)


def _clean(parser: argparse.ArgumentParser) -> None:
    _add_corpus(parser)
    add = parser.add_argument
    add("--rules", nargs="+", default=list(RULES), metavar="RULE", help=f"rules to apply, of {', '.join(RULES)} (all)")
    add("--no-preserve-markup", action="store_true", help="clean Markdown and LaTeX like prose")
    languages = "keep documents in these languages (en zh ...); none: all"
    add("--languages", nargs="+", default=[], metavar="CODE", help=languages)
    least = "least characters of a cleaned document; shorter ones are left out (1)"
    add("--least-characters", type=int, default=1, help=least)


def _deduplicate(parser: argparse.ArgumentParser) -> None:
    _add_corpus(parser)
    add = parser.add_argument
    level = "unit that is compared and removed (document)"
    add("--level", choices=["document", "line"], default="document", help=level)
    method = "exact: equal except white space; minhash: similar (minhash)"
    add("--method", choices=["exact", "minhash"], default="minhash", help=method)
    threshold = "least Jaccard index of five-word shingles of similar texts (0.7)"
    add("--threshold", type=float, default=0.7, help=threshold)
    least = "least characters of a compared line; shorter lines are kept (20)"
    add("--least-characters", type=int, default=20, help=least)
    add("--memory", type=int, default=1024, help="MiB that a worker may use to match texts (1024)")


def _score(parser: argparse.ArgumentParser) -> None:
    workers = "processes that write what is kept, once the ranks have scored all"
    _add_corpus(parser, workers=workers, log_interval=10_000)
    add = parser.add_argument
    add("run", type=Path, help="folder of a trained run with data.tokenizer set")
    add("--max-perplexity", type=float, help="keep documents up to this perplexity")
    add("--keep-quantile", type=float, help="keep this fraction of the documents, those of lowest perplexity")
    dtype = "dtype of the model's weights and computation (the run's train.dtype); scores depend on it"
    add("--dtype", choices=DTYPES, help=dtype)
    add("--samples", type=int, default=20, help="kept documents, and as many removed ones, on the page (20)")
    add("--seed", type=int, default=0, help="seed of the samples (0)")


TRAIN_TOKENIZER = Command(
    "train-tokenizer",
    "train a byte-level BPE on jsonl, parquet and plain text, and write its tokenizer.json",
    _train_tokenizer,
    "data.train_tokenizer",
    "megalin data train-tokenizer --input 'corpus/*.jsonl.zst' --vocab-size 32000 --output tokenizer.json",
    adopts_launcher=False,
    prints_result=False,
    outputs={"--output": Output.FILE},
)
PREPROCESS = Command(
    "preprocess",
    "tokenize jsonl, parquet and plain text into Megatron token shards, with Megatron's option names",
    _preprocess,
    "data.preprocess",
    """\
megalin data preprocess --input 'corpus/*.jsonl.zst' --output-prefix data/corpus \\
    --tokenizer-model tokenizer.json --append-eod --workers 8
mpirun -n 64 megalin data preprocess --input @files.txt --output-prefix data/corpus \\
    --tokenizer-model tokenizer.json --append-eod""",
    adopts_launcher=False,  # its ranks meet through MPI
    prints_result=False,
    outputs={"--output-prefix": Output.PREFIX},
)
CLEAN = Command(
    "clean",
    "clean a corpus by a selection of rules, and report the effect of each",
    _clean,
    "data.clean",
    "megalin data clean --input 'raw/*.jsonl' --output-prefix clean/corpus --languages en --workers 8",
    adopts_launcher=False,
    prints_result=False,
    outputs={"--output-prefix": Output.PREFIX},
)
DEDUPLICATE = Command(
    "deduplicate",
    "remove documents or lines that are equal, or similar by MinHash",
    _deduplicate,
    "data.deduplicate",
    "megalin data deduplicate --input 'clean/*.jsonl' --output-prefix unique/corpus --workers 8",
    adopts_launcher=False,
    prints_result=False,
    outputs={"--output-prefix": Output.PREFIX},
)
SCORE = Command(
    "score",
    "filter a corpus by the perplexity of a trained run, on any number of ranks",
    _score,
    "data.score",
    """\
megalin data score runs/mine --input 'unique/*.jsonl' --output-prefix good/corpus --keep-quantile 0.8
torchrun --nproc-per-node 8 -m megalin data score runs/mine --input 'unique/*.jsonl' \\
    --output-prefix good/corpus --max-perplexity 40""",
    takes_mixers=True,
    prints_result=False,
    outputs={"--output-prefix": Output.PREFIX},
)
