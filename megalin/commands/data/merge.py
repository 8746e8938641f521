"""`megalin data merge`: shards merged into one, or one split by documents, in constant memory."""

from __future__ import annotations

import argparse
from pathlib import Path

from megalin.data.shards.merging import WrittenShard, merge_shards, split_shard
from megalin.errors import ConfigError


def run(args: argparse.Namespace) -> int:
    """Runs the command and returns the exit code."""
    for shard in _write(args):
        print(f"{shard.prefix}: {shard.documents} documents, {shard.sequences} sequences, {shard.tokens} tokens")
    return 0


def _write(args: argparse.Namespace) -> list[WrittenShard]:
    prefixes = [prefix for name in args.input for prefix in _prefixes(name)]
    if args.split is None:
        return [merge_shards(prefixes, args.output_prefix)]
    if len(prefixes) != 1:
        raise ConfigError(f"--split needs a single shard, but --input names {len(prefixes)}; merge them first")
    try:
        weights = [float(weight) for weight in args.split.split(",")]
    except ValueError:
        raise ConfigError(f"--split {args.split}: give comma-separated numbers, as 969,30,1") from None
    outputs = [f"{args.output_prefix}_{number}" for number in range(len(weights))]
    return split_shard(prefixes[0], outputs, weights)


def _prefixes(name: str) -> list[str]:
    if not Path(name).is_dir():
        return [name]
    found = sorted(str(path.with_suffix("")) for path in Path(name).glob("*.idx"))
    if not found:
        raise ConfigError(f"--input {name}: no .idx file in this folder; give prefixes, or a folder of shards")
    return found
