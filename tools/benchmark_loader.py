"""Benchmark of the data loader alone: tokens a second that one process reads, packs, hashes and returns.

python tools/benchmark_loader.py shards/text --sequence-length 2048 --workers 2

Does the work of training without a model, as one rank of --dp-size. Without a prefix it writes a shard of documents of
log-normal lengths (median 400, mean 830 tokens) to a temporary folder. "core_seconds_per_million_tokens" is the time of
all threads: at a million tokens a second, the fraction of one core that data loading takes. --step-seconds pauses
between steps as if a model ran; "wait_fraction" is the fraction of all time that the trainer would wait for data.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from megalin.config import parse
from megalin.data.config import DataConfig
from megalin.data.loader import Loader
from megalin.data.shards.indexed_dataset import ShardWriter
from megalin.data.sources import open_training
from megalin.terminal_output import exit_code

_VOCAB_SIZE = 50_000
_TOKENS = 60_000_000


def write_shard(prefix: Path, num_tokens: int) -> str:
    """Writes a shard of about `num_tokens` tokens; returns its prefix."""
    rng = np.random.default_rng(0)
    with ShardWriter(prefix, np.dtype("uint16")) as writer:
        while writer.num_tokens < num_tokens:
            writer.add_sequence(rng.integers(0, _VOCAB_SIZE, int(min(rng.lognormal(6.0, 1.2), 100_000)) + 1))
            writer.end_document()
        writer.publish()
    return str(prefix)


def measure(config: DataConfig, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Measures the time to open the data, and rates over `args.steps` steps after an untimed one."""
    started = time.perf_counter()
    training = open_training(
        config, _VOCAB_SIZE, seed=0, steps=args.steps + 1, global_batch_size=args.global_batch_size, folder=folder
    )
    opened = time.perf_counter() - started
    waits = []
    with (
        training.dataset,
        Loader(
            training.dataset,
            training.order,
            global_batch_size=args.global_batch_size,
            micro_batch_size=args.micro_batch_size,
            dp_size=args.dp_size,
            workers=config.workers,
            read_ahead_steps=config.read_ahead_steps,
        ) as loader,
    ):
        loader.step(0)
        started, busy = time.perf_counter(), time.process_time()
        for step in range(1, args.steps + 1):
            time.sleep(args.step_seconds)
            requested = time.perf_counter()
            loader.step(step)
            waits.append(time.perf_counter() - requested)
        seconds, core_seconds = time.perf_counter() - started, time.process_time() - busy
    tokens = args.steps * args.global_batch_size // args.dp_size * config.sequence_length
    return {
        "open_seconds": round(opened, 3),
        "tokens_per_second": round(tokens / seconds),
        "core_seconds_per_million_tokens": round(core_seconds / tokens * 1e6, 4),
        "wait_fraction": round(sum(waits) / seconds, 4),
        "slowest_wait_seconds": round(max(waits), 4),
    }


def main(arguments: list[str] | None = None) -> int:
    """Runs the tool; returns 0, or the exit code of the printed error."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("prefixes", nargs="*", help="paths of shards without .bin and .idx (a generated shard)")
    add("--sequence-length", type=int, default=2048, help="tokens per sample (2048)")
    add("--packing", default="concatenate", help="as data.packing (concatenate)")
    add("--order", default="megalin", help="as data.order (megalin)")
    add("--workers", type=int, default=2, help="as data.workers (2)")
    add("--read-ahead-steps", type=int, default=1, help="as data.read_ahead_steps (1)")
    add("--global-batch-size", type=int, default=512, help="samples per step over all ranks (512)")
    add("--micro-batch-size", type=int, default=4, help="samples per micro-batch of a rank (4)")
    add(
        "--dp-size",
        type=int,
        default=1,
        help="number of ranks that read different samples; measured as the first of them (1)",
    )
    add("--steps", type=int, default=40, help="timed steps (40)")
    add("--step-seconds", type=float, default=0.0, help="pause before each step, as if a model ran (0)")
    args = parser.parse_args(arguments)
    if args.steps < 1:
        parser.error(f"--steps {args.steps}: use at least 1")
    if args.step_seconds < 0.0:
        parser.error(f"--step-seconds {args.step_seconds}: use 0 or more")
    return exit_code(lambda: _run(args))


def _run(args: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        prefixes = args.prefixes or [write_shard(Path(folder) / "made", _TOKENS)]
        names = ("sequence_length", "packing", "order", "workers", "read_ahead_steps")
        config = parse(DataConfig, {"train": prefixes} | {name: getattr(args, name) for name in names}, "arguments")
        found = measure(config, Path(folder), args)
    print(json.dumps({"packing": config.packing, "order": config.order, "workers": config.workers, **found}))


if __name__ == "__main__":
    sys.exit(main())
