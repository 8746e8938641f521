"""Turns a Megatron-LM command, script or YAML, or a DeepSpeed JSON, into TOML, and lists what has no counterpart."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from megalin.errors import ConfigError, exit_code
from megalin.interop.configs.reading import import_config


def main(arguments: list[str] | None = None) -> int:
    """Runs the tool; the exit code is 0, 1 where the TOML needs something filled in, or that of the printed error."""
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("source", help="a shell script, .yaml or .json; a command in quotes; - for a script on standard input")
    add("output", type=Path, help="the TOML to write")
    add("overrides", nargs="*", metavar="key=value", help="what to fill in, as model.vocab_size=50304")
    add("--variable", action="append", default=[], metavar="NAME=VALUE", help="of the script; its arguments by number")
    add("--deepspeed-config", type=Path, metavar="JSON", help="beside a command of Megatron-DeepSpeed")
    args = parser.parse_args(arguments)
    return exit_code(lambda: _run(args))


def _run(args: argparse.Namespace) -> int:
    for variable in args.variable:
        if "=" not in variable:
            raise ConfigError(
                f"--variable {variable!r} is not of the form NAME=VALUE, as DATA_PATH=shards/text or 1=runs"
            )
    imported = import_config(
        args.source,
        args.output,
        variables=dict(variable.split("=", 1) for variable in args.variable),
        deepspeed_config=args.deepspeed_config,
        overrides=args.overrides,
    )
    for key, value, source in imported.mapped:
        print(f"{key} = {value!r}  <-  {source}")
    print("", *imported.report(), sep="\n")
    print(f"{args.output}: " + ("a config that loads" if imported.complete else "to be filled in"))
    return 0 if imported.complete else 1


if __name__ == "__main__":
    sys.exit(main())
