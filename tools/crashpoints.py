"""Crash points of a save: the process dies, or fails, at each operation on the file system of save, publish and prune.

python tools/crashpoints.py
python tools/crashpoints.py --errno ENOSPC
python tools/crashpoints.py --background

After each, a verified checkpoint must load: the old one or the new one, with the right values. With --errno the
operation raises instead, and the save must end with a StorageError or succeed. The last line counts the points.
"""

from __future__ import annotations

import argparse
import errno
import logging
import multiprocessing
import os
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from fault_matrix import changes

from megalin.checkpoint.background import BackgroundSaver
from megalin.checkpoint.index import DTYPES
from megalin.checkpoint.load import load, newest
from megalin.checkpoint.publishing import prepare
from megalin.checkpoint.save import save_now
from megalin.errors import MegalinError, StorageError


class Found(NamedTuple):
    """Result of the crash points that were tried."""

    points: int
    lost: int
    """Points after which no right checkpoint loads."""
    wrong: int
    """Points at which an error was not a StorageError."""


def _tensors(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {f"weight{number}": torch.randn(30, 4, generator=generator) for number in range(3)}


def _save(root: Path, step: int, *, background: bool = False) -> None:
    # Three files, so that there are points between them.
    tensors = _tensors(step)
    publication = prepare(root, step=step, tensors=tensors, state={"step": step}, keep_latest=2)
    if not background:
        save_now(publication, tensors, file_bytes=1200)
        return
    saver = BackgroundSaver(60.0)
    with saver.completing():
        saver.start(publication, tensors, file_bytes=1200)
        saver.finish()


def _save_and_crash(root: Path, number: int, code: int | None, background: bool) -> None:
    """Saves step 3, after which step 1 is pruned; exits with 0, 5 after a StorageError, 1 after another error."""
    logging.disable()
    if code is None:
        changes.die_at_operation(number)
    else:
        changes.fail_at_operation(number, code)
    try:
        _save(root, 3, background=background)
    except StorageError:
        os._exit(5)
    os._exit(0)


def _count(root: Path, output: Path, background: bool) -> None:
    changes.count_operations(str(output))
    _save(root, 3, background=background)


def _is_right(root: Path) -> bool:
    """Whether the newest checkpoint is of step 2 or 3 and has its values."""
    try:
        checkpoint = newest(root)
        if checkpoint is None or checkpoint.step not in (2, 3):
            return False
        records = checkpoint.index().tensors
        tensors = {name: torch.zeros(record.shape, dtype=DTYPES[record.dtype]) for name, record in records.items()}
        load(checkpoint, tensors)
    except MegalinError:
        return False
    return all(torch.equal(tensors[name], value) for name, value in _tensors(checkpoint.step).items())


def _in_process(target: partial[None]) -> int:
    process = multiprocessing.get_context("fork").Process(target=target)
    process.start()
    process.join()
    assert process.exitcode is not None
    return process.exitcode


def crash_points(folder: Path, *, code: int | None = None, every: int = 1, background: bool = False) -> Found:
    """Tries every `every`-th operation: kills there, or raises OSError with the errno `code`.

    Args:
        background: the save runs in a thread.
    """
    folder.mkdir(parents=True)

    def prepared(name: str) -> Path:
        for step in (1, 2):
            _save(folder / name, step)
        return folder / name

    counter = folder / "count"
    assert _in_process(partial(_count, prepared("counted"), counter, background)) == 0
    lost = wrong = 0
    numbers = range(1, int(counter.read_text()) + 1, every)
    for number in numbers:
        root = prepared(str(number))
        exit_code = _in_process(partial(_save_and_crash, root, number, code, background))
        lost += not _is_right(root)
        wrong += exit_code not in ((-9,) if code is None else (0, 5))
    return Found(len(numbers), lost, wrong)


def main(arguments: list[str] | None = None) -> int:
    """Runs the tool; returns 0 if nothing is lost and every error is a StorageError."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--errno", help="raise this error, for example ENOSPC or EIO, instead of dying")
    parser.add_argument("--background", action="store_true", help="save in the background")
    args = parser.parse_args(arguments)
    code = None if args.errno is None else getattr(errno, args.errno, None)
    if args.errno is not None and not isinstance(code, int):
        parser.error(f"--errno {args.errno}: no such error; use ENOSPC, EIO or EDQUOT")
    logging.getLogger("megalin").setLevel(logging.ERROR)  # leftovers and damaged directories are warnings
    with tempfile.TemporaryDirectory() as folder:
        found = crash_points(Path(folder) / "points", code=code, background=args.background)
    good = found.points - found.lost
    print(f"{good} of {found.points} points leave a verified checkpoint; {found.wrong} end with another error")
    return int(found.lost > 0 or found.wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
