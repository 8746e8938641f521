#!/usr/bin/env bash
# Whether an installation works: what is compiled loads, torch sees the GPUs that are there, and two ranks compute what
# one does. The health check of the images: on CPUs and at the lowest priority, so that a run beside it hardly notices.
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
python -m megalin verify examples/quickstart/transnormer.toml --tp 2
