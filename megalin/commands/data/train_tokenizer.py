"""`megalin data train-tokenizer`: a byte-level BPE trained on text."""

from __future__ import annotations

import argparse

from megalin.data.corpus import documents, inputs
from megalin.data.tokenizers.tokenizer import BytePairTrainer
from megalin.data.tokenizers.whole_characters import read_characters


def run(args: argparse.Namespace) -> int:
    """Runs the command and returns the exit code."""
    characters = "" if args.initial_alphabet is None else read_characters(args.initial_alphabet)
    trainer = BytePairTrainer(args.vocab_size, special_tokens=args.special_tokens, characters=characters)
    paths = inputs.expand_inputs(args.input)
    texts = documents.iterate_texts(paths, args.json_keys, limit_bytes=documents.DEFAULT_DOCUMENT_BYTES)
    trainer.train(texts).save(args.output)
    print(f"{trainer.vocab_size} ids: {args.output}")
    return 0
