"""The result of `megalin fit` as one HTML page and as pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megalin.errors import StorageError
from megalin.files import write_atomically
from megalin.report.html import Page, add, add_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Figures = Mapping[str, "tuple[str, Figure]"]
"""Caption and figure by name, as `figures` returns them."""


def write_page(figures: Figures, lines: Sequence[str], path: Path) -> None:
    """Writes the text of the fit and its figures as one HTML file. Raises StorageError."""
    page = Page("Scaling laws")
    add(page.body, "h1", "Scaling laws")
    for caption, figure in figures.values():
        add_figure(page.body, caption, figure, caption)
    add(page.body, "h2", "Numbers")
    add(page.body, "pre", "\n".join(lines))
    try:
        write_atomically(path, page.finish())
    except OSError as error:
        raise StorageError(f"{path}: cannot be written ({error.strerror}); choose another --html") from None


def write_pictures(figures: Figures, folder: Path) -> list[Path]:
    """Writes each figure as a PNG into `folder`, which it creates. Raises StorageError."""
    written = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, (_, figure) in figures.items():
            figure.savefig(folder / f"{name}.png", format="png")
            written.append(folder / f"{name}.png")
    except OSError as error:
        raise StorageError(f"{folder}: cannot be written ({error.strerror}); choose another --png") from None
    return written
