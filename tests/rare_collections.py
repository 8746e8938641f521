"""Rarer garbage collections in the process that imports this, and in those forked from it: a tenth of the CPU time."""

import gc

gc.set_threshold(50_000, 20, 20)

_unfreeze, _unfrozen = gc.unfreeze, False


def _recorded_unfreeze() -> None:
    global _unfrozen
    _unfreeze()
    _unfrozen = True


gc.unfreeze = _recorded_unfreeze


def freeze_again() -> None:
    """Excludes all objects from collections again, after a run of the trainer in this process, whose end lets them go.
    `gc.get_freeze_count`, which would say so too, counts them one by one."""
    global _unfrozen
    if _unfrozen:
        gc.freeze()
        _unfrozen = False
