"""Breaks what ranks exchange, on every axis, one line at a time, and shows that the suite goes red.

python tools/mutation_check.py [NAME ...]

Each mutation of tools/mutations.toml is one textual change of a copy of the tree, against which its tests run until one
fails. Exit code 0: unchanged, every test passes, and each change is noticed by one.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]


class Mutation(NamedTuple):
    """One mistake."""

    name: str
    file: str
    """Under the root."""
    old: str
    """Text that the file holds once."""
    new: str
    tests: str
    """What pytest runs."""
    only: str = ""
    """pytest's -k: the cases among them."""


MUTATIONS = tuple(
    Mutation(**table) for table in tomllib.loads((ROOT / "tools/mutations.toml").read_text())["mutations"]
)


def check(mutation: Mutation, *, holds: str) -> None:
    """Raises SystemExit where the mutated file does not hold the text exactly once."""
    if holds.count(mutation.old) != 1:
        raise SystemExit(
            f"mutation {mutation.name}: {mutation.file} holds {mutation.old!r} {holds.count(mutation.old)} times, not "
            "once; bring tools/mutations.toml in step with the code"
        )


def copy_tree(target: Path) -> None:
    """What the tests need of the tree, compiled modules too."""
    ignored = shutil.ignore_patterns("__pycache__", ".git", "build", "runs", ".*_cache", ".venv", ".whl")
    shutil.copytree(ROOT, target, symlinks=True, ignore=ignored)


def run(tree: Path, tests: Sequence[str], only: str) -> bool:
    """Whether the tests pass in the tree."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "not slow", *tests]
    if only:
        command += ["-k", only]
    environment = os.environ | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1):
        raise SystemExit(f"{' '.join(command)} did not run:\n{done.stdout}{done.stderr}")
    return done.returncode == 0


def imports_from(tree: Path) -> Path:
    """Where `import megalin` comes from in the tree's runs."""
    command = [sys.executable, "-c", "import megalin; print(megalin.__file__)"]
    environment = os.environ | {"PYTHONPATH": str(tree)}
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=True)
    return Path(done.stdout.strip())


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the mutations of these names, or all; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="mutations (all)")
    names = parser.parse_args(arguments).names
    chosen = [mutation for mutation in MUTATIONS if not names or mutation.name in names]
    if unknown := set(names) - {mutation.name for mutation in MUTATIONS}:
        raise SystemExit(f"unknown: {', '.join(sorted(unknown))}; known: {', '.join(m.name for m in MUTATIONS)}")
    for mutation in chosen:
        check(mutation, holds=(ROOT / mutation.file).read_text())
    survivors = []
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        copy_tree(tree)
        assert imports_from(tree).is_relative_to(tree), imports_from(tree)
        for tests, only in sorted({(mutation.tests, mutation.only) for mutation in chosen}):
            if not run(tree, [tests], only):
                raise SystemExit(f"{tests} -k {only!r} is red without any change; make it green first")
        for mutation in chosen:
            started, path = time.monotonic(), tree / mutation.file
            original = path.read_text()
            path.write_text(original.replace(mutation.old, mutation.new))
            survived = run(tree, [mutation.tests], mutation.only)
            path.write_text(original)
            survivors += [mutation.name] * survived
            verdict = "SURVIVED" if survived else "red"
            print(f"{verdict:8}  {mutation.name}  ({time.monotonic() - started:.0f} s)", flush=True)
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} mutations were noticed")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
