"""Libraries that only some inputs need: imported at the first use, and named with the remedy where they are missing."""

from __future__ import annotations

import importlib
from typing import Any

from megalin.errors import ConfigError


def require(module: str, purpose: str, *, extra: str = "data") -> Any:
    """Imports `module`, which that extra of megalin brings.

    Raises:
        ConfigError: it is not installed; `purpose` says what asked for it.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module.partition(".")[0]:
            raise
        raise ConfigError(
            f"{purpose} needs the library {error.name}; install it: pip install 'megalin[{extra}]'"
        ) from None
