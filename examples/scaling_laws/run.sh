#!/usr/bin/env bash
# Trains the rungs of one mixer of ladder.toml on one GPU, the largest first, and goes on where the last call ended.
# Usage: run.sh MIXER [SECONDS] [FOLDER]     TNL, HGRN2 or LLaMA; 570 seconds; runs/ladder
# Each result is written as soon as its run has ended. Exits with 75 where the time did not suffice: call it again.
# Needs torch, the packages of pyproject.toml and ladder-data (data.sh); no network.
set -euo pipefail
here=$(realpath --relative-to=. "$(dirname "$0")")
mixer=$1 seconds=${2:-570} folder=${3:-runs/ladder}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-2}

ladder() { python -m megalin ladder "$here/ladder.toml" --folder "$folder" --mixer "$mixer" "$@"; }

[[ -d $folder ]] || ladder --dry-run
code=0
# SIGTERM makes the runs in progress save; 25 seconds later what is left is killed, and goes on from its checkpoint.
timeout --kill-after=25 "$seconds" \
    python -m megalin ladder "$here/ladder.toml" --folder "$folder" --mixer "$mixer" --processes 3 || code=$?
ladder --status
exit "$((code == 124 ? 75 : code))"
