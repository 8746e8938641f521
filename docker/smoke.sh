#!/usr/bin/env bash
# Checks an installation: compiled modules load, torch sees the machine's GPUs, and two ranks compute the same as one.
# Health check of the images; runs on CPUs at the lowest priority, so that it hardly slows down a training run.
# Usage: smoke.sh     with the installation's python on the path
set -euo pipefail
renice -n 19 $$ >/dev/null
cd "$(dirname "$0")/.."

fail() {
    echo "smoke: $*" >&2
    exit 1
}

python -c 'import megalin._index' || fail "the index builder does not load"
if [[ ${MEGALIN_REQUIRE_CUDA:-} == 1 ]]; then
    python -c 'import megalin._C' || fail "the CUDA kernels do not load"
fi
if compgen -G '/dev/nvidia[0-9]*' >/dev/null; then
    python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' ||
        fail "torch does not see the GPU; is the host's driver older than this CUDA?"
fi
export CUDA_VISIBLE_DEVICES='' OMP_NUM_THREADS=1
python -m megalin verify examples/quickstart/transnormer.toml
