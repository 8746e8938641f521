"""Converts a run of Megatron-LM, gpt-neox or DeepSpeed to TOML; lists options without counterpart."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from megalin.errors import ConfigError, exit_code
from megalin.interop.configs.reading import import_config


def main(arguments: list[str] | None = None) -> int:
    """Runs the tool; returns 0, 1 if the TOML lacks values or settings, or the exit code of the printed error."""
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("source", help="a shell script, .yaml or .json; a command in quotes; - for a script on standard input")
    add("output", type=Path, help="TOML file to write")
    add("overrides", nargs="*", metavar="key=value", help="values to fill in, as model.vocab_size=50304")
    add(
        "--variable",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="variable of the script; its arguments by number",
    )
    add("--deepspeed-config", type=Path, metavar="JSON", help="DeepSpeed JSON of a Megatron-DeepSpeed command")
    args = parser.parse_args(arguments)
    return exit_code(lambda: _run(args))


def _run(args: argparse.Namespace) -> int:
    for variable in args.variable:
        if "=" not in variable:
            raise ConfigError(
                f"--variable {variable!r} is not of the form NAME=VALUE, for example DATA_PATH=shards/text or 1=runs"
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
    code, text = imported.outcome()
    print(f"{args.output}: {text}")
    return code


if __name__ == "__main__":
    sys.exit(main())
