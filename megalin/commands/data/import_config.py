"""`megalin data import-config`: a config of Megatron-LM, gpt-neox or DeepSpeed as TOML."""

from __future__ import annotations

import argparse

from megalin.errors import ConfigError
from megalin.interop.configs.reading import import_config


def run(args: argparse.Namespace) -> int:
    """Runs the command and returns the exit code."""
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
