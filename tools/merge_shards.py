"""Lays shards end to end as one shard, or cuts one into parts by documents; memory does not grow with their size."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from megalin.data.shards.merging import WrittenShard, merge_shards, split_shard
from megalin.errors import ConfigError, exit_code


def main(arguments: list[str] | None = None) -> int:
    """Runs the tool; the exit code is 0, or the one of the error that is printed."""
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--input", nargs="+", required=True, help="prefixes of shards; a folder stands for all in it, by name")
    add("--output-prefix", required=True, help="the new shard; with --split, <prefix>_0, <prefix>_1 and so on")
    add("--split", metavar="W,W,...", help="cut the one input into parts of these shares of its documents")
    args = parser.parse_args(arguments)
    return exit_code(lambda: _run(args))


def _run(args: argparse.Namespace) -> None:
    for shard in _write(args):
        print(f"{shard.prefix}: {shard.documents} documents, {shard.sequences} sequences, {shard.tokens} tokens")


def _write(args: argparse.Namespace) -> list[WrittenShard]:
    prefixes = [prefix for name in args.input for prefix in _prefixes(name)]
    if args.split is None:
        return [merge_shards(prefixes, args.output_prefix)]
    if len(prefixes) != 1:
        raise ConfigError(f"--split cuts one shard, but --input names {len(prefixes)}; merge them first")
    try:
        weights = [float(weight) for weight in args.split.split(",")]
    except ValueError:
        raise ConfigError(f"--split {args.split}: give numbers with commas between them, as 969,30,1") from None
    outputs = [f"{args.output_prefix}_{part}" for part in range(len(weights))]
    return split_shard(prefixes[0], outputs, weights)


def _prefixes(name: str) -> list[str]:
    if not Path(name).is_dir():
        return [name]
    found = sorted(str(path.with_suffix("")) for path in Path(name).glob("*.idx"))
    if not found:
        raise ConfigError(f"--input {name}: a folder without an .idx file; name prefixes, or the folder of shards")
    return found


if __name__ == "__main__":
    sys.exit(main())
