#!/usr/bin/env bash
# Collects the text of this Python, trains a tokenizer on it, and writes token shards of both splits.
# Usage: data.sh FOLDER VOCAB_SIZE     CORPUS_SHARE=0.1 uses a tenth of the text; COLLECT=SCRIPT collects another text
set -euo pipefail
here=$(realpath --relative-to=. "$(dirname "$0")")
data=$1

say() { printf '\n== %s\n' "$*"; }

say "text: ${COLLECT:-the sources, help topics and docstrings of this Python}"
python "${COLLECT:-$here/collect.py}" "$data" --share "${CORPUS_SHARE:-1.0}"

say 'tokenizer and token shards'
python -m megalin data train-tokenizer --input "$data/train.jsonl" --vocab-size "$2" --output "$data/tokenizer.json"
for split in train held-out; do
    python -m megalin data preprocess --input "$data/$split.jsonl" --output-prefix "$data/$split" \
        --tokenizer-model "$data/tokenizer.json" --append-eod --workers 2
done
python -m megalin data inspect "$data/held-out_text_document" --tokenizer-model "$data/tokenizer.json" --validate
