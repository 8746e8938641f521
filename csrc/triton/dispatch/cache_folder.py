"""Folder of what later processes of this user find again: measured tiles and passed self-tests."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """MEGALIN_CACHE, or ~/.cache/megalin without that variable."""
    folder = os.environ.get("MEGALIN_CACHE")
    return Path(folder) if folder else Path.home() / ".cache" / "megalin"
