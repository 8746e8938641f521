"""Heat map of needles in a haystack: the outcome at each depth and context length, as a PNG."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megalin.errors import StorageError


def write_heat_map(details: Mapping[str, Any], title: str, path: Path) -> None:
    """Draws the outcomes of a needle task.

    Args:
        details: of its `TaskResult`: success [depths][lengths], lengths, and accuracy_at_length.

    Raises:
        StorageError: the file cannot be written.
    """
    from matplotlib.figure import Figure  # takes half a second, and only one rank draws

    success, lengths = details["success"], details["lengths"]
    depths = len(success)
    figure = Figure(figsize=(2.4 + 0.7 * len(lengths), 1.6 + 0.28 * depths), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    axes.imshow(success, cmap="RdYlGn", vmin=0, vmax=1, aspect="auto")
    found = details["accuracy_at_length"]
    axes.set_xticks(range(len(lengths)), [f"{n:,}\n{x:.0%}" for n, x in zip(lengths, found, strict=True)])
    axes.set_yticks(range(depths), [f"{step / max(depths - 1, 1):.0%}" for step in range(depths)])
    axes.set_xlabel("context length in tokens, and the fraction found there")
    axes.set_ylabel("depth of the needle")
    axes.set_title(title)
    try:
        path.parent.mkdir(exist_ok=True)
        figure.savefig(path, format="png")
    except OSError as error:
        raise StorageError(f"{path}: cannot be written ({error.strerror}); free space or fix the permissions") from None
