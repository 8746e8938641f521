"""Corpus from text that every machine with Python has: the standard library's sources, help topics and docstrings."""

from __future__ import annotations

import argparse
import hashlib
import importlib
import inspect
import itertools
import json
import platform
import sys
import sysconfig
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path
from pydoc_data import topics
from typing import Any, NamedTuple

HELD_OUT_SHARE = 0.02
# Third-party text, tables of character codes, and the help topics, which `help_topics` collects.
LEFT_OUT = ("site-packages/", "dist-packages/", "__pycache__/", "encodings/", "pydoc_data/")
LICENSE_NOTE = """\
train.jsonl and held-out.jsonl contain text of the standard library of Python {version}:
its sources, its help topics, and the docstrings of the modules that are built into the interpreter.

{copyright}

It is licensed under the PSF License Agreement, version 2, https://docs.python.org/3/license.html;
some files name another licence at their top; that page lists them.
"""


class Document(NamedTuple):
    """A text and its origin."""

    source: str
    text: str


def sources(library: Path) -> Iterator[Document]:
    """The library's Python files by name, one document each, without undecodable ones (files of its tests)."""
    for path in sorted(library.rglob("*.py")):
        name = path.relative_to(library).as_posix()
        if any(part in f"{name}/" for part in LEFT_OUT):
            continue
        try:
            with tokenize.open(path) as file:
                yield Document(name, file.read())
        except (SyntaxError, UnicodeDecodeError):
            continue


def help_topics() -> Iterator[Document]:
    """The texts of `help("TOPIC")`."""
    for name, text in sorted(topics.topics.items()):
        yield Document(f"help topic {name}", text)


def docstrings() -> Iterator[Document]:
    """Docstrings of each module that is built into the interpreter and so has no Python source."""
    for name in sorted(sys.builtin_module_names):
        parts = list(_docstrings_of(name, importlib.import_module(name), depth=2))
        yield Document(f"docstrings of {name}", "\n\n".join(parts))


def _docstrings_of(name: str, owner: Any, depth: int) -> Iterator[str]:
    """Docstring of `owner`, and of its public members down to `depth` levels."""
    text = inspect.getdoc(owner)
    if text:
        yield f"{name}\n\n{text}"
    if depth and (inspect.ismodule(owner) or inspect.isclass(owner)):
        for key, member in sorted(vars(owner).items()):
            if not key.startswith("_") and callable(member):
                yield from _docstrings_of(f"{name}.{key}", member, depth - 1)


def collect(folder: Path, share: float) -> dict[str, list[Document]]:
    """Writes train.jsonl, held-out.jsonl and LICENSE.txt into `folder`; returns the documents of each split.

    Args:
        share: fraction of the documents to use, those with the smallest hashes.
    """
    library = Path(sysconfig.get_path("stdlib"))
    found = itertools.chain(sources(library), help_topics(), docstrings())
    note = LICENSE_NOTE.format(version=platform.python_version(), copyright=sys.copyright)
    return write_splits(folder, found, share, note)


def write_splits(folder: Path, found: Iterable[Document], share: float, note: str) -> dict[str, list[Document]]:
    """Writes train.jsonl, held-out.jsonl and LICENSE.txt with the text `note`; returns the documents of each split.

    The split is by the hash of the text, so it is independent of the order of the files. Equal texts count once, so no
    text is in both splits.

    Args:
        share: fraction of the documents to use, those with the smallest hashes.
    """
    documents = {text_hash(document.text): document for document in found if document.text.strip()}
    by_hash = sorted(documents)[: max(2, round(share * len(documents)))]
    taken, held_out = set(by_hash), set(by_hash[: max(1, round(HELD_OUT_SHARE * len(by_hash)))])
    splits: dict[str, list[Document]] = {"train": [], "held-out": []}
    for digest, document in documents.items():
        if digest in taken:
            splits["held-out" if digest in held_out else "train"].append(document)
    folder.mkdir(parents=True, exist_ok=True)
    for split, members in splits.items():
        with (folder / f"{split}.jsonl").open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(document._asdict()) + "\n" for document in members)
    (folder / "LICENSE.txt").write_text(note, encoding="utf-8")
    return splits


def print_sizes(splits: dict[str, list[Document]]) -> None:
    """Prints the number of documents and bytes of each split."""
    for split, documents in splits.items():
        size_bytes = sum(len(document.text.encode()) for document in documents)
        print(f"{split:9}{len(documents):6,} documents {size_bytes / 1e6:8.2f} MB")


def text_hash(text: str) -> str:
    """SHA-256 of a text, in hexadecimal."""
    return hashlib.sha256(text.encode()).hexdigest()


def main() -> int:
    """Collects the corpus into a folder and prints its size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--share", type=float, default=1.0, help="fraction of the documents to use (1.0)")
    arguments = parser.parse_args()
    print_sizes(collect(arguments.folder, arguments.share))
    print(f"licence: PSF License Agreement, version 2, noted in {arguments.folder / 'LICENSE.txt'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
