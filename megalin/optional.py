"""Optional libraries: imported at the first use; a missing one is an error with the command that installs it."""

from __future__ import annotations

import importlib
from typing import Any

from megalin.errors import ConfigError


def require(module: str, purpose: str, *, extra: str = "data") -> Any:
    """Imports `module`, a dependency in megalin's `extra`.

    Raises:
        ConfigError: it is not installed; the message starts with `purpose`.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module.partition(".")[0]:
            raise
        raise ConfigError(
            f"{purpose} needs the library {error.name}; install it: pip install 'megalin[{extra}]'"
        ) from None
