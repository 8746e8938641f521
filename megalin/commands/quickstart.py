"""`megalin quickstart`: text, tokenizer, shards, a trained model, its evaluation and a report, in a few minutes."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

import megalin
from megalin.errors import ConfigError


def examples_folder() -> Path:
    """The folder of the examples: part of an installed package, beside the package in a checkout.

    Raises:
        ConfigError: neither is there.
    """
    package = Path(megalin.__file__).parent
    for folder in (package / "examples", package.parent / "examples"):
        if (folder / "quickstart/run.sh").is_file():
            return folder
    raise ConfigError(f"{package}: megalin is installed without its examples; install it again from a wheel")


def run(arguments: argparse.Namespace) -> int:
    """Runs the command and returns the exit code of the script, examples/quickstart/run.sh."""
    script = examples_folder() / "quickstart/run.sh"
    bash = shutil.which("bash")
    if bash is None:
        raise ConfigError(f"bash is not on the path; install it, or follow the commands of {script}")
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"}
    if arguments.corpus_share is not None:
        if not 0 < arguments.corpus_share <= 1:
            raise ConfigError(f"--corpus-share {arguments.corpus_share}: use a fraction above 0 and at most 1")
        environment["CORPUS_SHARE"] = str(arguments.corpus_share)
    return subprocess.run([bash, str(script), *arguments.overrides], env=environment, check=False).returncode
