"""`megalin data train-tokenizer`: a byte-level BPE trained on text."""

from __future__ import annotations

import argparse
import sys
from collections import Counter

from megalin.data.corpus import documents, inputs
from megalin.data.tokenizers.tokenizer import BytePairTrainer
from megalin.data.tokenizers.whole_characters import read_characters


def run(args: argparse.Namespace) -> int:
    """Runs the command and returns the exit code."""
    characters = "" if args.initial_alphabet is None else read_characters(args.initial_alphabet)
    trainer = BytePairTrainer(args.vocab_size, special_tokens=args.special_tokens, characters=characters)
    paths = inputs.expand_inputs(args.input)
    bad_lines: Counter[str] = Counter()
    limit_bytes = args.max_document_bytes
    texts = documents.iterate_texts(paths, args.json_keys, limit_bytes=limit_bytes, bad_lines=bad_lines)
    try:
        trainer.train(texts)
    finally:  # also where nothing is left to train on
        for kind, count in sorted(bad_lines.items()):
            print(f"left out: {count} x {kind}", file=sys.stderr)
    trainer.save(args.output)
    print(f"{trainer.vocab_size} ids: {args.output}")
    return 0
