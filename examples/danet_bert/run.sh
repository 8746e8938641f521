#!/usr/bin/env bash
# Pretrains a DANet encoder on this machine's own Python library, and fine-tunes it as a text classifier.
# Usage: run.sh [key=value ...]   overrides of danet.toml, such as train.steps=1000
# Writes danet-data/ and runs/danet/ in the current folder, and replaces the results of an earlier run.
# CORPUS_SHARE=0.1 uses a tenth of the text; CLASSIFY_STEPS=20 sets the number of fine-tuning steps.
set -euo pipefail
here=$(realpath --relative-to=. "$(dirname "$0")")
config=$here/danet.toml
data=danet-data
run=runs/danet

export OMP_NUM_THREADS=${OMP_NUM_THREADS:-2}
# By default glibc returns large blocks to the system at each free; the page faults took a quarter of the time.
export MALLOC_MMAP_THRESHOLD_=33554432 MALLOC_TRIM_THRESHOLD_=1073741824

say() { printf '\n== %s\n' "$*"; }
resolved=$(python -m megalin config "$config" "$@")
field() { sed -n "s/^$1 = //p" <<<"$resolved"; }

say 'text: the sources, help topics and docstrings of this Python'
rm -rf "$run"
mkdir -p "$run"
python "$here/../quickstart/collect.py" "$data" --share "${CORPUS_SHARE:-1.0}"

say 'tokenizer with special tokens, and token shards'
python -m megalin data train-tokenizer --input "$data/train.jsonl" --vocab-size "$(field vocab_size)" \
    --special-tokens '[CLS]' '[SEP]' '[MASK]' '[PAD]' --output "$data/tokenizer.json"
for split in train held-out; do
    python -m megalin data preprocess --input "$data/$split.jsonl" --output-prefix "$data/$split" \
        --tokenizer-model "$data/tokenizer.json" --workers 2
done

say 'pretraining: masked tokens and sentence pairs'
python -m megalin train "$config" --folder "$run" "$@"
python -m megalin eval "$run"

say 'fine-tuning: whether a line is code or comment'
for split in train held-out; do
    python "$here/labels.py" "$data/$split.jsonl" "$data/$split-labelled.jsonl"
done
python "$here/classify.py" "$run" --train "$data/train-labelled.jsonl" --test "$data/held-out-labelled.jsonl" \
    --output "$run/classifier" --steps "${CLASSIFY_STEPS:-300}"
