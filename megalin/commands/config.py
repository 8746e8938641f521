"""`megalin config`: the resolved config of a run as TOML, or the JSON schema of config files."""

from __future__ import annotations

import argparse
import json

from megalin.config import dumps
from megalin.errors import ConfigError
from megalin.train.config import load_run_config
from megalin.train.schema import config_schema


def run(arguments: argparse.Namespace) -> int:
    """Runs the command and returns the exit code."""
    if arguments.schema == (arguments.config is not None):
        raise ConfigError("give a config file, or --schema for the schema of all config files; one of them")
    if arguments.schema:
        print(json.dumps(config_schema(), indent=1))
    else:
        # Imported here, since they need torch and the schema does not.
        from megalin.evaluation.in_loop import check_run

        config = load_run_config(arguments.config, arguments.overrides)
        check_run(config)
        print(dumps(config), end="")
    return 0
