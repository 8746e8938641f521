"""Fuzz test of checkpoints: each mutated one must be refused by name, and the one before it must load.

python tools/fuzz_checkpoints.py --count 1000

A mutation flips a bit, truncates, lengthens, empties or removes a file of the newest checkpoint, or replaces it by the
same file of another step. Fails where a mutant is accepted, the message does not name the file, or the checkpoint
before is not found; any other error than CheckpointError ends the tool with its traceback.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch

from megalin.checkpoint.load import newest, of_step
from megalin.checkpoint.save import save
from megalin.errors import CheckpointError

KINDS = ("bit", "truncated", "longer", "empty", "removed", "other step")


def _save(root: Path, step: int) -> Path:
    generator = torch.Generator().manual_seed(step)
    tensors = {f"weight{number}": torch.randn(30, 4, generator=generator) for number in range(3)}
    return save(root, step=step, tensors=tensors, state={"step": step}, file_bytes=1200)


def mutate(path: Path, other: Path, kind: str, rng: random.Random) -> None:
    """Applies one mutation to the file; `other` is the same file of another step."""
    data = path.read_bytes()
    place = rng.randrange(len(data))
    match kind:
        case "bit":
            path.write_bytes(data[:place] + bytes([data[place] ^ 1 << rng.randrange(8)]) + data[place + 1 :])
        case "truncated":
            os.truncate(path, place)
        case "longer":
            path.write_bytes(data + rng.randbytes(1 + place % 9))
        case "empty":
            os.truncate(path, 0)
        case "removed":
            path.unlink()
        case _:
            shutil.copy(other, path)


def fuzz(folder: Path, *, count: int, seed: int) -> Counter[str]:
    """Damages the newest of two checkpoints `count` times; returns counts of the outcomes."""
    rng, found = random.Random(seed), Counter[str]()
    before, target = _save(folder, 1), _save(folder, 2)
    good = {path: path.read_bytes() for path in target.iterdir()}
    for _ in range(count):
        path, kind = rng.choice(sorted(good)), rng.choice(KINDS)
        mutate(path, before / path.name, kind, rng)
        if path.exists() and path.read_bytes() == good[path]:
            found["unchanged"] += 1
        else:
            found[_outcome(folder, path)] += 1
        path.write_bytes(good[path])
    return found


def _outcome(root: Path, path: Path) -> str:
    try:
        checkpoint = of_step(root, 2)
        checkpoint.state()
        checkpoint.index()
    except CheckpointError as error:
        if path.name not in str(error):
            return "not named"
        earlier = newest(root)
        return "refused" if earlier is not None and earlier.step == 1 else "not replaced"
    return "accepted"


def main(arguments: list[str] | None = None) -> int:
    """Runs the tool; returns 0 if every changed checkpoint was refused by name."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1000, help="number of mutants (1000)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the mutations (0)")
    args = parser.parse_args(arguments)
    logging.getLogger("megalin").setLevel(logging.ERROR)  # each mutant is skipped with a warning
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        found = fuzz(Path(folder), count=args.count, seed=args.seed)
    print(json.dumps({"mutants": args.count, "seconds": round(time.monotonic() - started, 1), **found}))
    return int(found["refused"] + found["unchanged"] != args.count)


if __name__ == "__main__":
    sys.exit(main())
