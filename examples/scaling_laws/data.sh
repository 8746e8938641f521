#!/usr/bin/env bash
# Makes the corpus of corpus.toml here and in language_modelling, a tokenizer of 4,096 ids trained on it, and token shards.
# Usage: data.sh [FOLDER]     ladder-data by default; needs apt-get and dpkg of Debian 12, and downloads 200 MB
# CORPUS_SHARE=0.1 uses a tenth of the text.
set -euo pipefail
here=$(realpath --relative-to=. "$(dirname "$0")")
text=$here/../language_modelling
export CORPUS_SOURCES=$text/corpus.toml:$here/corpus.toml COLLECT=$text/collect_packages.py
exec bash "$here/../quickstart/data.sh" "${1:-ladder-data}" 4096
