"""Trains a byte-level BPE on jsonl, parquet and plain text and writes its tokenizer.json."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from megalin.data.corpus import documents, inputs
from megalin.data.tokenizers.tokenizer import BytePairTrainer
from megalin.data.tokenizers.whole_characters import read_characters
from megalin.errors import exit_code


def main(arguments: list[str] | None = None) -> int:
    """Runs the tool; returns 0, or the exit code of the printed error."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--input", nargs="+", required=True, help="files, globs or @FILE: .jsonl, .txt, also .gz or .zst; .parquet")
    add("--json-keys", nargs="+", default=["text"], help="keys of text; bad lines are skipped")
    add("--vocab-size", type=int, required=True, help="vocabulary size, with the 256 bytes and <|endoftext|>")
    add("--special-tokens", nargs="+", default=[], help="tokens that never occur in text, as [CLS] [SEP] [MASK] [PAD]")
    add("--initial-alphabet", type=Path, help="UTF-8 file: its characters become single tokens; others remain bytes")
    add("--output", type=Path, required=True, help="path of the tokenizer.json")
    args = parser.parse_args(arguments)
    return exit_code(lambda: _run(args))


def _run(args: argparse.Namespace) -> None:
    characters = "" if args.initial_alphabet is None else read_characters(args.initial_alphabet)
    trainer = BytePairTrainer(args.vocab_size, special_tokens=args.special_tokens, characters=characters)
    paths = inputs.expand_inputs(args.input)
    texts = documents.iterate_texts(paths, args.json_keys, limit_bytes=documents.DEFAULT_DOCUMENT_BYTES)
    trainer.train(texts).save(args.output)
    print(f"{trainer.vocab_size} ids: {args.output}")


if __name__ == "__main__":
    sys.exit(main())
