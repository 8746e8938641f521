#!/usr/bin/env bash
# Builds sdist and wheels into dist/, tries each wheel in a fresh environment outside of the checkout, writes checksums.
# Usage: tools/release.sh [PYTHON ...]    a wheel for each, for example python3.11 python3.12 python3.13
# RELEASE_VENV_OPTIONS=--system-site-packages takes torch from the environment of each PYTHON.
# The wheels have no CUDA kernels unless MEGALIN_CUDA=1. Nothing is uploaded.
set -euo pipefail
cd "$(dirname "$0")/.."
(($#)) || set -- python3
export MEGALIN_CUDA=${MEGALIN_CUDA:-0}

fail() {
    echo "release: $*" >&2
    exit 1
}

version=$(sed -n 's/^version = "\(.*\)"$/\1/p' pyproject.toml)
[[ $(sed -n 's/^__version__ = "\(.*\)"$/\1/p' megalin/__init__.py) == "$version" ]] ||
    fail "megalin/__init__.py has another version than pyproject.toml ($version)"
grep -q "^## \[$version\]" CHANGELOG.md || fail "CHANGELOG.md has no section [$version]"

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
rm -rf dist
number=0
for python in "$@"; do
    number=$((number + 1))
    here=$work/$number
    mkdir "$here"
    echo "release: building $version with $("$python" --version)"
    "$python" -m venv "$here/build"
    "$here/build/bin/python" -m pip install -qq --disable-pip-version-check build
    kinds=(--wheel)
    ((number > 1)) || kinds=(--sdist --wheel)
    "$here/build/bin/python" -m build "${kinds[@]}" --outdir "$here/dist" . >"$here/build.log" 2>&1 || {
        tail -n 20 "$here/build.log" >&2
        fail "the build with $python failed"
    }
    echo 'release: trying the wheel in a fresh environment'
    # shellcheck disable=SC2086 # several options
    "$python" -m venv ${RELEASE_VENV_OPTIONS:-} "$here/venv"
    "$here/venv/bin/python" -m pip install -qq --disable-pip-version-check "$here"/dist/megalin-*.whl
    (
        cd "$here" &&
            venv/bin/megalin --version &&
            venv/bin/megalin params hgrn2-tiny &&
            venv/bin/megalin quickstart --corpus-share 0.2
    ) || fail "the wheel of $python does not work"
    mkdir -p dist
    mv "$here"/dist/* dist/
done

(cd dist && sha256sum -- * >SHA256SUMS && cat SHA256SUMS)
echo "release: dist/ holds megalin $version"
