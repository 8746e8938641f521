"""Corpus of the documentation, dictionaries and sources of Debian packages, and of Python's standard library."""

from __future__ import annotations

import argparse
import fnmatch
import gzip
import os
import platform
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, NamedTuple

sys.path.append(str(Path(__file__).resolve().parents[1] / "quickstart"))

from collect import Document, help_topics, print_sizes, sources, text_hash, write_splits

DICTIONARY_BYTES = 32_768
_HIDDEN_TAGS = ("script", "style", "nav", "head")
_LINE_TAGS = ("p", "br", "div", "li", "pre", "tr", "h1", "h2", "h3", "h4", "h5", "dt", "dd", "table")


class Source(NamedTuple):
    """A table [[sources]] of corpus.toml."""

    package: str
    """Debian package, as a file of `--packages` or downloaded by apt-get."""
    paths: list[str]
    """Globs of its files; * matches / as well."""
    format: str
    """text, html or dictionary."""
    license: str
    archive: str | None = None
    """Tar archive in the package that holds the paths."""
    max_bytes: int | None = None
    """Largest size of the text."""


class _Text(HTMLParser):
    """The visible text of a page."""

    def __init__(self) -> None:
        super().__init__()
        self._hidden, self.parts = 0, list[str]()

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self._hidden += tag in _HIDDEN_TAGS
        if tag in _LINE_TAGS:
            self.parts.append("\n")

    def handle_endtag(self, tag: str) -> None:
        self._hidden -= tag in _HIDDEN_TAGS
        if tag in _LINE_TAGS:
            self.parts.append("\n")

    def handle_data(self, data: str) -> None:
        if self._hidden <= 0:
            self.parts.append(data)


def html_text(page: str) -> str:
    """The visible text of an HTML page, at most one empty line in a row."""
    parser = _Text()
    parser.feed(page)
    lines: list[str] = []
    for line in "".join(parser.parts).split("\n"):
        if line.strip() or (lines and lines[-1]):
            lines.append(line.rstrip())
    return "\n".join(lines)


def cut(text: str, size: int) -> Iterator[str]:
    """Documents of at least `size` characters, except the last, that end at blank lines."""
    start = 0
    while start < len(text):
        end = text.find("\n\n", start + size)
        end = len(text) if end < 0 else end + 2
        yield text[start:end]
        start = end


def documents(source: Source, packages: Path) -> list[Document]:
    """The documents of a source: all, or those with the smallest hashes up to `max_bytes`.

    Raises:
        ValueError: a format that does not exist, or paths that no file matches.
    """
    found = []
    for name, data in _files(source, packages):
        text = (gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data).decode("utf-8", "replace")
        if source.format == "dictionary":
            parts = cut(text, DICTIONARY_BYTES)
            found += [Document(f"{source.package}/{name} {index}", part) for index, part in enumerate(parts)]
        elif source.format in ("text", "html"):
            found.append(Document(f"{source.package}/{name}", html_text(text) if source.format == "html" else text))
        else:
            raise ValueError(f"{source.package}: format = {source.format!r}: use text, html or dictionary")
    if not found:
        raise ValueError(f"{source.package} has no file {' or '.join(source.paths)}; is it the version of Debian 12?")
    if source.max_bytes is None:
        return found
    taken, size = [], 0
    for document in sorted(found, key=lambda each: text_hash(each.text)):
        size += len(document.text.encode())
        if size > source.max_bytes:
            break
        taken.append(document)
    return taken


def _files(source: Source, packages: Path) -> Iterator[tuple[str, bytes]]:
    """Names and bytes of the source's files, links left out."""
    folder = unpacked(source.package, packages)
    if source.archive is None:
        for path in sorted(folder.rglob("*")):
            name = path.relative_to(folder).as_posix()
            if path.is_file() and not path.is_symlink() and _matches(name, source.paths):
                yield name, path.read_bytes()
        return
    with tarfile.open(folder / source.archive) as archive:
        for member in archive:
            if member.isfile() and _matches(member.name, source.paths):
                file = archive.extractfile(member)
                assert file is not None, member.name
                yield member.name.partition("/")[2], file.read()


def _matches(name: str, globs: list[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, glob) for glob in globs)


def unpacked(package: str, packages: Path) -> Path:
    """The folder of a package's files under `packages`; downloads and unpacks it where it is missing."""
    folder = packages / package
    if not folder.is_dir():
        packages.mkdir(parents=True, exist_ok=True)
        if not any(packages.glob(f"{package}_*.deb")):
            subprocess.run(["apt-get", "download", package], cwd=packages, check=True)
        (file,) = packages.glob(f"{package}_*.deb")
        partial = folder.with_name(f"{package}.partial")
        subprocess.run(["dpkg", "-x", file, partial], check=True)
        partial.rename(folder)
    return folder


def main() -> int:
    """Collects the corpus into a folder and prints the size of each source."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    known = os.environ.get("CORPUS_SOURCES", str(Path(__file__).with_name("corpus.toml"))).split(os.pathsep)
    listing = "lists of packages (CORPUS_SOURCES, or corpus.toml)"
    parser.add_argument("--sources", type=Path, nargs="+", default=[Path(name) for name in known], help=listing)
    parser.add_argument("--packages", type=Path, help="folder of downloaded packages (FOLDER/packages)")
    parser.add_argument("--share", type=float, default=1.0, help="fraction of the documents to use (1.0)")
    arguments = parser.parse_args()
    packages = arguments.packages or arguments.folder / "packages"
    tables = [table for path in arguments.sources for table in tomllib.loads(path.read_text("utf-8"))["sources"]]
    listed = [Source(**table) for table in tables]
    found = [*sources(Path(sysconfig.get_path("stdlib"))), *help_topics()]
    notes = [f"Python {platform.python_version()}: PSF-2.0"]
    _print_size("Python's standard library", found)
    for source in listed:
        own = documents(source, packages)
        _print_size(source.package, own)
        found += own
        notes.append(f"{source.package}: {source.license}; usr/share/doc/{source.package}/copyright in it")
    note = "The text is from these packages, each under its own licence.\n\n" + "\n".join(notes) + "\n"
    print_sizes(write_splits(arguments.folder, found, arguments.share, note))
    return 0


def _print_size(name: str, found: list[Document]) -> None:
    size = sum(len(document.text.encode()) for document in found)
    print(f"{name:28}{len(found):7,} documents {size / 1e6:8.2f} MB", flush=True)


if __name__ == "__main__":
    sys.exit(main())
