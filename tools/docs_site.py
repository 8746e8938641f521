"""MkDocs hook of the documentation's site (mkdocs.yml): pages and files from outside of docs/.

Adds the README as the first page, the changelog, the help of every command, and the reference of the Python API, of
configs and of layers from their docstrings; gives links to other files of the repository a copy of the file in the
site; lists the pages of a folder in the navigation; and makes anchors as GitHub does, so that a page reads the same in
both.
"""

from __future__ import annotations

import ast
import contextlib
import io
import os
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from pymdownx.slugs import slugify

import megalin
from megalin.commands.arguments.groups import DATA, GROUPS
from megalin.commands.arguments.parser import build_parser

ROOT = Path(__file__).parents[1]
CONFIG_CLASS = re.compile(r"^class ([A-Z]\w*Config)\(", re.MULTILINE)
LINK = re.compile(r"(?<=\]\()[^)#:\s]+")
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
"""Files at the top of the repository that are pages of the site."""
COMMANDS = "reference/cli.md"
"""Page with the help of every command."""


REFERENCES = {
    "reference/python.md": (
        "Python API",
        "The names that `import megalin` gives, and those of `megalin.datasets`. How to use them: "
        "[Python API](../api.md); `megalin.ops`: [ops](ops.md).",
    ),
    "reference/configs.md": (
        "Config classes",
        "A run's config as Python classes, which `megalin.Trainer` takes; `megalin.train.config.RunConfig` holds the "
        "others. All keys with their defaults in one table each: [configuration](../configuration.md).",
    ),
    "reference/layers.md": (
        "Layers",
        "The modules that models are made of. A mixer's module has its config, the layer and, for most, its own parts; "
        "[how to add one](../adding-a-mixer.md).",
    ),
}
"""Pages that are made from docstrings: title and first paragraph."""


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Makes the anchors of headings as GitHub does, and lists the pages of folders in the navigation."""
    config.mdx_configs["toc"] = {**config.mdx_configs.get("toc", {}), "slugify": slugify(case="lower")}
    config.nav = _with_pages_of_folders(config.nav)
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages that lie elsewhere, and a copy of each file outside of docs/ that a page links to."""
    files.append(File.generated(config, COMMANDS, content=command_reference()))
    for page, (title, text) in REFERENCES.items():
        entries = "".join(f"\n::: {name}\n" for name in reference_names(page))
        files.append(File.generated(config, page, content=f"# {title}\n\n{text}\n{entries}"))
    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text("utf-8")))
    copies = {path for page in files.documentation_pages() for path in _linked(page) if _is_copied(path)}
    for path in sorted(copies):
        files.append(File.generated(config, _site_path(path), content=_text(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Points the links of the repository to the places in the site."""
    folder = posixpath.dirname(page.file.src_uri)

    def target(match: re.Match[str]) -> str:
        path = _repository_path(page.file, match[0])
        return posixpath.relpath(_site_path(path), folder or ".") if (ROOT / path).exists() else match[0]

    return LINK.sub(target, markdown)


def command_reference() -> str:
    """Markdown of every command's help."""
    sections = [f"# Command line\n\n```text\n{_help()}```\n"]
    for words, groups in (((), GROUPS), (("data",), DATA)):
        for command in (command for group in groups.values() for command in group):
            names = (*words, command.name)
            sections.append(f"\n## megalin {' '.join(names)}\n\n```text\n{_help(*names)}```\n")
    return "".join(sections)


def reference_names(page: str) -> list[str]:
    """The objects that a page of REFERENCES documents, without importing them."""
    if page == "reference/python.md":
        exported = ast.literal_eval(_datasets_names())
        own = [f"megalin.{name}" for name in megalin.__all__ if name not in ("datasets", "ops")]
        return [*own, *(f"megalin.datasets.{name}" for name in exported)]
    if page == "reference/configs.md":
        found = [
            f"{_module(path)}.{name}"
            for folder in ("train", "data", "model", "optim", "parallel", "checkpoint")
            for path in sorted((ROOT / "megalin" / folder).glob("*.py"))
            for name in CONFIG_CLASS.findall(path.read_text("utf-8"))
        ]
        return sorted(found, key=lambda name: not name.endswith(".RunConfig"))
    layers = (ROOT / "megalin/layers").rglob("*.py")
    return [_module(path) for path in sorted(layers) if path.name != "__init__.py"]


def _datasets_names() -> str:
    """The list `__all__` of megalin.datasets as text."""
    text = (ROOT / "megalin/datasets.py").read_text("utf-8")
    return text.partition("__all__ = ")[2].partition("]")[0] + "]"


def _module(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def _help(*command: str) -> str:
    """Output of `megalin COMMAND --help`, in lines of 100 characters."""
    os.environ["COLUMNS"] = "100"
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.suppress(SystemExit):
        build_parser().parse_args([*command, "--help"])
    return output.getvalue()


def _with_pages_of_folders(nav: Any) -> Any:
    """The navigation with each `folder/` replaced by its README and its pages, dated ones newest first."""
    if isinstance(nav, dict):
        return {title: _with_pages_of_folders(entry) for title, entry in nav.items()}
    if isinstance(nav, list):
        return [_with_pages_of_folders(entry) for entry in nav]
    if not nav.endswith("/"):
        return nav
    pages = sorted(path.name for path in (ROOT / "docs" / nav).glob("*.md") if path.name != "README.md")
    return [f"{nav}{name}" for name in ("README.md", *(pages[::-1] if pages[0].startswith("20") else pages))]


def _linked(page: File) -> list[str]:
    """Paths in the repository that a page links to."""
    return [_repository_path(page, link) for link in LINK.findall(page.content_string)]


def _repository_path(page: File, link: str) -> str:
    folder = "" if page.src_uri in PAGES.values() else posixpath.join("docs", posixpath.dirname(page.src_uri))
    return posixpath.normpath(posixpath.join(folder, link))


def _is_copied(path: str) -> bool:
    return (ROOT / path).exists() and not path.startswith(("docs/", "..")) and path not in PAGES


def _site_path(path: str) -> str:
    """The place in the site of a path in the repository; a browser shows copies, whose names end in .txt, as text."""
    if path.startswith("docs/"):
        inside = path.removeprefix("docs/")
        return f"{inside}/README.md" if (ROOT / path / "README.md").is_file() else inside
    return PAGES.get(path) or f"source/{path}.txt"


def _text(path: Path) -> str:
    """The text of a file, or the names in a folder."""
    return path.read_text("utf-8") if path.is_file() else "".join(f"{each.name}\n" for each in sorted(path.iterdir()))
