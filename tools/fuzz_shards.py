"""Fuzz test of shard indexes: each mutated .idx must be refused with a DataError, or be structurally sound.

python tools/fuzz_shards.py --count 1000000 --folder /dev/shm

Counts refused mutants, accepted ones, and accepted ones with different bytes: an entry of the document index may move
without breaking a rule, which only the digest in a manifest detects. Fails on any other error, on an open of more than
50 ms of CPU time, and on more than 64 MiB of additional memory (a limit of the process).
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import numpy as np

from megalin.data.shards.indexed_dataset import Shard, ShardWriter, bin_path, idx_path
from megalin.data.shards.inspection import digest
from megalin.errors import DataError

_SEQUENCES = 40
_LIMIT_BYTES = 64 << 20
_LIMIT_SECONDS = 0.05
_EXTREMES = [0, 1, 0x7F, 0x80, 0xFF]
_NUMBERS = [0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1]


def write_shard(prefix: Path, rng: np.random.Generator) -> bytes:
    """Writes a shard of short and empty sequences; returns the bytes of its .idx."""
    with ShardWriter(prefix, np.dtype("uint16")) as writer:
        for number in range(_SEQUENCES):
            writer.add_sequence(rng.integers(0, 1000, rng.integers(0, 9)))
            if number % 3:
                writer.end_document()
        writer.end_document()
        writer.publish()
    return idx_path(prefix).read_bytes()


def mutant(data: bytes, rng: np.random.Generator) -> bytes:
    """Applies one to three changes: a bit, a byte or an integer replaced, bytes deleted, inserted or swapped."""
    changed = bytearray(data)
    for _ in range(int(rng.integers(1, 4))):
        place = int(rng.integers(0, max(1, len(changed))))
        kind = int(rng.integers(0, 6))
        if kind == 0 and changed:
            changed[place % len(changed)] ^= 1 << int(rng.integers(0, 8))
        elif kind == 1 and changed:
            changed[place % len(changed)] = _EXTREMES[int(rng.integers(0, len(_EXTREMES)))]
        elif kind == 2:
            width = int(rng.choice([4, 8]))
            number = _NUMBERS[int(rng.integers(0, len(_NUMBERS)))] % 2 ** (8 * width)
            changed[place : place + width] = number.to_bytes(width, "little")
        elif kind == 3:
            del changed[place : place + int(rng.integers(1, 30))]
        elif kind == 4:
            changed[place:place] = rng.bytes(int(rng.integers(1, 30)))
        else:
            other = int(rng.integers(0, max(1, len(changed))))
            changed[place : place + 4], changed[other : other + 4] = (
                changed[other : other + 4],
                changed[place : place + 4],
            )
    return bytes(changed)


def fuzz(folder: Path, *, count: int, seed: int) -> dict[str, float | int]:
    """Opens `count` mutants in `folder`; returns counts of the outcomes. Raises any error except DataError."""
    rng = np.random.default_rng(seed)
    prefix = folder / "shard"
    good = write_shard(prefix, rng)
    original_digest = digest(prefix)
    found: Counter[str] = Counter()
    slowest = 0.0
    for _ in range(count):
        data = mutant(good, rng)
        idx_path(prefix).write_bytes(data)
        started = time.thread_time()
        try:
            with Shard(prefix) as shard:
                shard.read(0, shard.num_tokens)
            kind = "accepted"
        except DataError:
            kind = "refused"
        slowest = max(slowest, time.thread_time() - started)
        found[kind] += 1
        if kind == "accepted" and data != good:
            found["accepted with other bytes"] += 1
            found["of these with the same digest"] += digest(prefix) == original_digest
    bin_path(prefix).unlink()
    return {**found, "slowest_seconds": slowest}


def limit_memory() -> None:
    """Limits this process to 64 MiB more memory than it has."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + _LIMIT_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def main(arguments: list[str] | None = None) -> int:
    """Runs the tool; returns 0 if every mutant was refused or accepted correctly."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100_000, help="number of mutants (100000)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the mutations (0)")
    parser.add_argument("--folder", help="folder for the mutants; a disk would take most of the time (TMPDIR)")
    args = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        limit_memory()
        started = time.monotonic()
        found = fuzz(Path(folder), count=args.count, seed=args.seed)
        seconds = time.monotonic() - started
    print(json.dumps({"mutants": args.count, "seconds": round(seconds, 1), **found}))
    return int(found["slowest_seconds"] > _LIMIT_SECONDS or found.get("of these with the same digest", 0) > 0)


if __name__ == "__main__":
    sys.exit(main())
