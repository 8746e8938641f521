#!/usr/bin/env bash
# Makes the corpus of corpus.toml, a tokenizer of 8,192 ids trained on it, and token shards of both splits.
# Usage: data.sh [FOLDER]     lm-data by default; needs apt-get and dpkg of Debian 12, and downloads 200 MB
# CORPUS_SHARE=0.1 uses a tenth of the text.
set -euo pipefail
here=$(realpath --relative-to=. "$(dirname "$0")")
COLLECT=$here/collect_packages.py exec bash "$here/../quickstart/data.sh" "${1:-lm-data}" 8192
