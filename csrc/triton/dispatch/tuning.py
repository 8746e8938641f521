"""Choice of a kernel's configuration: the recorded one on the GPU it was measured on, elsewhere by autotuning.

On any other GPU the first launch of a shape class times each of a few candidates once and caches the fastest in
MEGALIN_CACHE/tiles.json (~/.cache/megalin without that variable), by GPU and Triton version. MEGALIN_TUNE=0 takes the
first candidate instead, the one with the smallest resource needs.
"""

from __future__ import annotations

import json
import logging
import os
import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import torch

import triton
from megalin._triton.dispatch.chips import MEASURED_ON
from triton.errors import TritonError

MAX_CANDIDATES = 6
TIMED_LAUNCHES = 3

Configuration = TypeVar("Configuration", bound=tuple[int, ...])

_log = logging.getLogger(__name__)
_found: dict[tuple[str, str], tuple[int, ...]] = {}


def choose(
    kernel: str,
    shape: str,
    recorded: Configuration,
    candidates: Sequence[Configuration],
    launch: Callable[[Configuration], None],
) -> Configuration:
    """Configuration of `kernel` for a class of shapes, independent of length; may call `launch` to time candidates.

    Candidates that do not compile or fit are skipped; if none is left, returns the first, whose launch then raises.
    """
    assert 0 < len(candidates) <= MAX_CANDIDATES, len(candidates)
    gpu = current_gpu()
    if gpu is None:
        return recorded
    if os.environ.get("MEGALIN_TUNE") == "0" or torch.cuda.is_current_stream_capturing():
        return candidates[0]
    key = (gpu, f"{kernel} {shape}")
    if key not in _found:
        kept = read_cache().get(gpu, {}).get(key[1])
        known = next((candidate for candidate in candidates if list(candidate) == kept), None)
        _found[key] = search(key, candidates, launch) if known is None else known
    return next(candidate for candidate in candidates if candidate == _found[key])


def current_gpu() -> str | None:
    """Name of the GPU with its compute capability and Triton's version; None on that of the tables, or without one."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() == MEASURED_ON:
        return None
    major, minor = torch.cuda.get_device_capability()
    return f"{torch.cuda.get_device_name()} {major}.{minor} triton {triton.__version__}"


def search(
    key: tuple[str, str], candidates: Sequence[Configuration], launch: Callable[[Configuration], None]
) -> Configuration:
    """Times every candidate; returns the fastest and caches it on disk."""
    times: dict[Configuration, float] = {}
    for candidate in candidates:
        try:
            times[candidate] = milliseconds(lambda candidate=candidate: launch(candidate))
        except (RuntimeError, TritonError) as error:
            _log.info("%s %s: candidate %s failed: %s", *key, candidate, error)
    if not times:
        return candidates[0]
    best = min(times, key=times.__getitem__)
    _log.info("%s %s: %s, %.3f ms", *key, best, times[best])
    write_cache(key, best)
    return best


def milliseconds(call: Callable[[], None]) -> float:
    """Median time of a few launches on the device, after one that compiles."""
    call()
    times = []
    for _ in range(TIMED_LAUNCHES):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def cache_path() -> Path:
    """Path of the autotuning cache."""
    folder = os.environ.get("MEGALIN_CACHE")
    return (Path(folder) if folder else Path.home() / ".cache" / "megalin") / "tiles.json"


def read_cache() -> dict[str, dict[str, list[int]]]:
    """Cached configurations, GPU -> kernel and shape -> configuration; empty if the file is missing or unreadable."""
    path = cache_path()
    try:
        values = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        _log.warning("%s: %s; configurations will be tuned again", path, error)
        return {}
    if not isinstance(values, dict) or not all(isinstance(entry, dict) for entry in values.values()):
        _log.warning("%s: not a table of tables; configurations will be tuned again", path)
        return {}
    return values


def write_cache(key: tuple[str, str], configuration: tuple[int, ...]) -> None:
    """Adds one entry; if two processes write at the same time, one of the two entries is lost and tuned again."""
    path, values = cache_path(), read_cache()
    values.setdefault(key[0], {})[key[1]] = list(configuration)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".json", delete=False) as file:
            json.dump(values, file, indent=1, sort_keys=True)
        Path(file.name).replace(path)
    except OSError as error:
        _log.warning("%s: %s; configurations will be tuned again at the next start", path, error)
