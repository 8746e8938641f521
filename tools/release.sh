#!/usr/bin/env bash
# Builds sdist and wheel into dist/, tries the wheel in a fresh environment outside of the checkout, writes checksums.
# Usage: tools/release.sh [PYTHON]    RELEASE_VENV_OPTIONS=--system-site-packages takes torch from PYTHON's environment
# The wheel has no CUDA kernels unless MEGALIN_CUDA=1. Nothing is uploaded.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${1:-python3}
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
echo "release: building $version"
rm -rf dist
"$python" -m venv "$work/build"
"$work/build/bin/python" -m pip install -qq --disable-pip-version-check build
"$work/build/bin/python" -m build --outdir dist . >"$work/build.log" 2>&1 || {
    tail -n 20 "$work/build.log" >&2
    fail 'the build failed'
}

echo 'release: trying the wheel in a fresh environment'
# shellcheck disable=SC2086 # several options
"$python" -m venv ${RELEASE_VENV_OPTIONS:-} "$work/venv"
"$work/venv/bin/python" -m pip install -qq --disable-pip-version-check dist/megalin-*.whl
(
    cd "$work"
    venv/bin/megalin --version
    venv/bin/megalin params hgrn2-tiny
    venv/bin/megalin quickstart --corpus-share 0.2
) || fail 'the wheel does not work'

(cd dist && sha256sum -- * >SHA256SUMS && cat SHA256SUMS)
echo "release: dist/ holds megalin $version"
