#!/usr/bin/env bash
# Creates .venv with megalin in place: the tested pins on a CPU, or the torch that is there where it has a GPU.
# Usage: tools/install.sh [PYTHON]
# With MEGALIN_REQUIRE_CUDA=1 (images for clusters) it fails where torch or the kernels would be without CUDA.
set -euo pipefail
cd "$(dirname "$0")/.."
export DS_BUILD_OPS=0 # DeepSpeed's wheel is made without kernels, in seconds
python=${1:-python3}

fail() {
    echo "install: $*" >&2
    exit 1
}

command -v "$python" >/dev/null ||
    fail "$python: not found; install Python 3.11 or newer, or name it: make install PYTHON=/path/to/python3"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    fail "$("$python" --version) is too old; megalin needs 3.11 or newer: make install PYTHON=python3.11"
command -v "${CXX:-c++}" >/dev/null ||
    fail "${CXX:-c++}: no C++ compiler found; install one (Debian: apt-get install g++), or set CXX"

torch_version() {
    "$1" -c 'import torch; print(torch.__version__)' || fail "$1 cannot import torch"
}

if "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null; then
    # The CUDA build, its triton and its numpy belong together: the environment looks through to them.
    expected=$(torch_version "$python")
    echo "install: torch $expected sees a GPU and stays; creating .venv over it"
    "$python" -m venv --system-site-packages .venv
    [[ $(torch_version .venv/bin/python 2>/dev/null) == "$expected" ]] ||
        fail "torch $expected belongs to an active virtual environment, which .venv cannot see; deactivate it first"
    held=$(mktemp)
    trap 'rm -f "$held"' EXIT
    echo "torch==$expected" >"$held"
    export MEGALIN_CUDA=${MEGALIN_CUDA:-1} # the isolated build does not see this torch
    .venv/bin/python -m pip install -qq --disable-pip-version-check -c "$held" -e '.[dev]'
else
    pin=$(grep '^torch==' constraints.txt)
    expected=${pin#torch==}
    echo "install: no torch with a GPU here; creating .venv with $pin (about a minute, 2 GB)"
    "$python" -m venv .venv
    # torch alone and first: nothing else may choose its version.
    .venv/bin/python -m pip install -qq --disable-pip-version-check "$pin"
    if [[ ${MEGALIN_REQUIRE_CUDA:-} == 1 ]]; then
        .venv/bin/python -c 'import sys, torch; sys.exit(not torch.version.cuda)' ||
            fail "MEGALIN_REQUIRE_CUDA=1, but torch $(torch_version .venv/bin/python) is built without CUDA;" \
                "give pip an index of wheels for this CUDA: PIP_INDEX_URL"
    fi
    .venv/bin/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[dev]'
fi

found=$(torch_version .venv/bin/python)
# A local version (2.13.0+cpu) is a build of the pinned one.
[[ $found == "$expected" || ${found%%+*} == "$expected" ]] ||
    fail "torch $found came in place of $expected; remove .venv and report this"
if [[ ${MEGALIN_REQUIRE_CUDA:-} == 1 ]]; then
    .venv/bin/python -c 'import megalin._C' || fail "MEGALIN_REQUIRE_CUDA=1, but the CUDA kernels do not load"
fi
if compgen -G 'megalin/_C.*' >/dev/null; then kernels=compiled; else kernels='left out (MEGALIN_CUDA=1 compiles them)'; fi
echo "install: CUDA kernels $kernels"
echo "install: done, torch $found"
