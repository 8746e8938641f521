"""A run as an attacker would offer it: its files name a module whose code leaves a mark when it is imported."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megalin.train.train_state import STATE_FILE
from tests.checkpoint.saved import seal

PACKAGE = "downloaded"
TYPE = f"{PACKAGE}.payload"
_CODE = """
from pathlib import Path
from typing import Literal

Path({mark!r}).touch()

from megalin.layers.mixer_configs.glu import GLUConfig
from megalin.layers.mixers.glu import GLU as MIXER


class CONFIG(GLUConfig):
    type: Literal["downloaded.payload"] = "downloaded.payload"
"""


def forge(run: Path, target: Path, *, config: bool = True, state: bool = True) -> Path:
    """Copies a run and replaces the mixer glu by TYPE, in config.toml and in the states of its checkpoints."""
    shutil.copytree(run, target)
    if config:
        path = target / "config.toml"
        path.write_text(path.read_text().replace('type = "glu"', f'type = "{TYPE}"'))
    for checkpoint in (target / "checkpoints").glob("step-*") if state else ():
        path = checkpoint / STATE_FILE
        path.write_text(path.read_text().replace(json.dumps("glu"), json.dumps(TYPE)))
        seal(checkpoint)
    return target


@contextmanager
def planted(folder: Path) -> Iterator[Path]:
    """Writes the package of TYPE to `folder`, and yields the mark that its import leaves; then unloads the package."""
    mark, path = folder / "ran", list(sys.path)
    (folder / PACKAGE).mkdir()
    (folder / PACKAGE / "payload.py").write_text(_CODE.format(mark=str(mark)))
    try:
        yield mark
    finally:
        sys.path[:] = path
        for name in [name for name in sys.modules if name.partition(".")[0] == PACKAGE]:
            del sys.modules[name]
