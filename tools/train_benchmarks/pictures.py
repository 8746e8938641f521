"""Command line and file reading of the tools that plot results of tools/benchmark_train.py."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


def draw_lines(
    plot: Callable[[list[dict[str, Any]], Path], None], description: str | None, arguments: list[str] | None = None
) -> None:
    """Main function of a plotting tool: calls `plot` with the JSON lines of the input file and the output path."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lines", type=Path, help="output of benchmark_train; lines that are not JSON are skipped")
    parser.add_argument("picture", type=Path, help="PNG to write")
    args = parser.parse_args(arguments)
    lines = args.lines.read_text("utf-8").splitlines()
    plot([json.loads(line) for line in lines if line.startswith("{")], args.picture)
