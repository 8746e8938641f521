"""Mutation check: breaks the communication between ranks, one place at a time, and expects the tests to fail.

python tools/mutation_check.py [NAME ...]

Each mutation of tools/mutations.toml changes one place in a copy of the tree, against which its tests run until one
fails. Exit code 0: every test passes on the unchanged tree, and each mutation makes one of its tests fail.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]


class Mutation(NamedTuple):
    """One change of the code and the tests that must notice it."""

    name: str
    file: str
    """Path under the root."""
    symbol: str
    """Dotted name of the function, class or assignment to a name in the file that is changed; "": the whole file."""
    pattern: str
    """Regular expression that matches once in the symbol's source: its lines, from the first decorator on."""
    replacement: str
    """Template (`re.Match.expand`) of the text that replaces the match."""
    tests: str
    """Path or node id for pytest."""
    only: str = ""
    """pytest's -k: selects among the tests."""


MUTATIONS = tuple(
    Mutation(**table) for table in tomllib.loads((ROOT / "tools/mutations.toml").read_text())["mutations"]
)


def definitions(node: ast.AST, name: str) -> Iterator[ast.stmt]:
    """Yields the definitions of a name in a module, class or function, without the scopes nested in it."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            if child.name == name:
                yield child
        elif isinstance(child, ast.Assign | ast.AnnAssign):
            targets = child.targets if isinstance(child, ast.Assign) else [child.target]
            if any(isinstance(target, ast.Name) and target.id == name for target in targets):
                yield child
        else:
            yield from definitions(child, name)


def find_symbol(text: str, symbol: str) -> list[slice]:
    """Slices of a file's text that define a dotted name: whole lines, decorators included; "" is the whole text."""
    if not symbol:
        return [slice(0, len(text))]
    nodes: list[ast.AST] = [ast.parse(text)]
    for name in symbol.split("."):
        nodes = [found for node in nodes for found in definitions(node, name)]
    starts = [0, *(newline.end() for newline in re.finditer("\n", text)), len(text)]
    places = []
    for node in nodes:
        assert isinstance(node, ast.stmt), node
        assert node.end_lineno is not None, node
        first = min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", []))])
        places.append(slice(starts[first - 1], starts[node.end_lineno]))
    return places


def mutate(mutation: Mutation, text: str) -> str:
    """Returns the text of the mutation's file with its one place changed.

    Raises SystemExit unless the symbol is defined once, the pattern matches once in it and the replacement differs.
    """
    places = find_symbol(text, mutation.symbol)
    if len(places) != 1:
        raise SystemExit(
            f"mutation {mutation.name}: {mutation.file} defines {mutation.symbol} {len(places)} times, not once; set "
            "file and symbol in tools/mutations.toml to the place of the code"
        )
    matches = list(re.finditer(mutation.pattern, text[places[0]]))
    where = f"mutation {mutation.name}: in {mutation.symbol or 'the whole file'} ({mutation.file})"
    if len(matches) != 1:
        raise SystemExit(
            f"{where} the pattern {mutation.pattern!r} matches {len(matches)} times, not once; adapt the pattern (and "
            "the replacement) in tools/mutations.toml to the code"
        )
    new = matches[0].expand(mutation.replacement)
    if new == matches[0][0]:
        raise SystemExit(f"{where} the replacement changes nothing: {new!r}; adapt it in tools/mutations.toml")
    start = places[0].start
    return text[: start + matches[0].start()] + new + text[start + matches[0].end() :]


def copy_tree(target: Path) -> None:
    """Copies the part of the tree that the tests need, compiled modules included."""
    ignored = shutil.ignore_patterns("__pycache__", ".git", "build", "runs", ".*_cache", ".venv", ".whl")
    shutil.copytree(ROOT, target, symlinks=True, ignore=ignored)


def run(tree: Path, tests: Sequence[str], only: str) -> bool:
    """Runs the tests in the tree; returns True if they pass."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "not slow", *tests]
    if only:
        command += ["-k", only]
    done = subprocess.run(command, cwd=tree, env=_environment(tree), capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1):
        raise SystemExit(f"{' '.join(command)} did not run:\n{done.stdout}{done.stderr}")
    return done.returncode == 0


def imports_from(tree: Path) -> Path:
    """Path of the `megalin` that the tree's runs import."""
    command = [sys.executable, "-c", "import megalin; print(megalin.__file__)"]
    done = subprocess.run(command, cwd=tree, env=_environment(tree), capture_output=True, text=True, check=True)
    return Path(done.stdout.strip())


def _environment(tree: Path) -> dict[str, str]:
    """Of a run in the tree, without bytecode: a module's would hide a mutation of the same second and size."""
    return os.environ | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the named mutations, or all; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="mutations (default: all)")
    names = parser.parse_args(arguments).names
    chosen = [mutation for mutation in MUTATIONS if not names or mutation.name in names]
    if unknown := set(names) - {mutation.name for mutation in MUTATIONS}:
        raise SystemExit(f"unknown: {', '.join(sorted(unknown))}; known: {', '.join(m.name for m in MUTATIONS)}")
    for mutation in chosen:
        mutate(mutation, (ROOT / mutation.file).read_text())
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
            path.write_text(mutate(mutation, original))
            survived = run(tree, [mutation.tests], mutation.only)
            path.write_text(original)
            survivors += [mutation.name] * survived
            verdict = "SURVIVED" if survived else "red"
            print(f"{verdict:8}  {mutation.name}  ({time.monotonic() - started:.0f} s)", flush=True)
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} mutations were noticed")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
