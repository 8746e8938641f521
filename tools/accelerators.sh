#!/usr/bin/env bash
# Builds optional accelerators from source into .venv, at the commits named here; needs nvcc and a torch with CUDA.
# Usage: tools/accelerators.sh apex|flash-attn ...     MAX_JOBS bounds how many compilers run at a time
set -euo pipefail
cd "$(dirname "$0")/.."
apex=NVIDIA/apex@6424da3b4faa6c8f062da4a48c424fff3f02d42d
flash_attn=Dao-AILab/flash-attention@a8aa52b1ab3e9ca574c8a33b3f35afc017ffa2e2 # v2.8.3.post1
python=.venv/bin/python

fail() {
    echo "accelerators: $*" >&2
    exit 1
}

build() {
    "$python" -m pip install -q --disable-pip-version-check --no-build-isolation "git+https://github.com/$1"
}

(($#)) || fail "nothing to build; name apex, flash-attn or both"
for name in "$@"; do
    [[ $name == apex || $name == flash-attn ]] || fail "$name: unknown; use apex or flash-attn"
done
[[ -x $python ]] || fail "no .venv; run make install first"
"$python" -c 'import sys, torch; sys.exit(not torch.version.cuda)' ||
    fail "torch in .venv is built without CUDA, which these kernels need"

# Build dependencies. Both come from source: on PyPI, apex is another project.
"$python" -m pip install -q --disable-pip-version-check ninja packaging psutil wheel
for name in "$@"; do
    case $name in
    apex)
        APEX_CPP_EXT=1 APEX_CUDA_EXT=1 build "$apex"
        "$python" -c 'import torch, amp_C, fused_layer_norm_cuda'
        ;;
    flash-attn)
        FLASH_ATTENTION_FORCE_BUILD=TRUE build "$flash_attn"
        "$python" -c 'import flash_attn'
        ;;
    esac
done
