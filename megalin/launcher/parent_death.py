"""A signal that a process gets when its parent dies, however it dies."""

from __future__ import annotations

import ctypes
import sys

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
_prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None  # loaded before any fork


def end_with_parent(number: int) -> None:
    """Makes the kernel send signal `number` to this process when the thread that started it ends; only on Linux.

    A parent that died before the call sends nothing: compare `os.getppid()` afterwards.
    """
    if _prctl is not None:
        _prctl(_PR_SET_PDEATHSIG, number)
