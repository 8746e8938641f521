"""What the tools that draw lines of tools/benchmark_train.py share: their command line and how a file is read."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


def draw_lines(
    plot: Callable[[list[dict[str, Any]], Path], None], description: str | None, arguments: list[str] | None = None
) -> None:
    """The main of such a tool: `plot` gets the JSON lines of the first argument's file and the picture's path."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lines", type=Path, help="what benchmark_train printed; other lines than JSON are left out")
    parser.add_argument("picture", type=Path, help="PNG to write")
    args = parser.parse_args(arguments)
    lines = args.lines.read_text("utf-8").splitlines()
    plot([json.loads(line) for line in lines if line.startswith("{")], args.picture)
