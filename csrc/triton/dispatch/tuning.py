"""Choice of a kernel's configuration: the recorded one on the GPU it was measured on, elsewhere by autotuning.

On any other GPU the first launch of a shape class times each of a few candidates once and caches the fastest in
MEGALIN_CACHE/tiles.json (~/.cache/megalin without that variable), by GPU and Triton version. MEGALIN_TUNE=0 takes the
first candidate instead, the one with the smallest resource needs.

A self-test, whose sequences are too short to time, runs the configuration found earlier or the first candidate; one
that fails is not chosen again (`reject`). A search drops candidates whose results differ from the first one's.
"""

from __future__ import annotations

import json
import logging
import os
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

import triton
from megalin._triton.dispatch.cache_folder import cache_folder
from megalin._triton.dispatch.chips import MEASURED_ON
from triton.errors import TritonError

MAX_CANDIDATES = 6
TIMED_LAUNCHES = 3
BOUND = 1e-2
"""Relative difference from the first candidate's result above which a candidate is wrong rather than rounded."""

Configuration = TypeVar("Configuration", bound=tuple[int, ...])

_log = logging.getLogger(__name__)
_found: dict[tuple[str, str], tuple[int, ...]] = {}
_rejected: set[tuple[tuple[str, str], tuple[int, ...]]] = set()
_searches = True


def choose(
    kernel: str,
    shape: str,
    recorded: Configuration,
    candidates: Sequence[Configuration],
    launch: Callable[[Configuration], Tensor],
) -> Configuration:
    """Configuration of `kernel` for a class of shapes, independent of length; may call `launch`, which returns the
    kernel's result, to time candidates.

    Candidates that do not compile or fit are skipped; if none is left, returns the first, whose launch then raises.
    """
    assert 0 < len(candidates) <= MAX_CANDIDATES, len(candidates)
    gpu = current_gpu()
    if gpu is None:
        return recorded
    key = (gpu, f"{kernel} {shape}")
    candidates = [each for each in candidates if (key, each) not in _rejected] or candidates
    if os.environ.get("MEGALIN_TUNE") == "0" or torch.cuda.is_current_stream_capturing():
        return candidates[0]
    if key not in _found:
        kept = read_cache().get(gpu, {}).get(key[1])
        known = next((candidate for candidate in candidates if list(candidate) == kept), None)
        if known is None and not _searches:
            return candidates[0]
        _found[key] = search(key, candidates, launch) if known is None else known
    return next(candidate for candidate in candidates if candidate == _found[key])


@contextmanager
def without_search() -> Iterator[None]:
    """Context manager in which shapes without a known configuration take the first candidate."""
    global _searches
    _searches = False
    try:
        yield
    finally:
        _searches = True


def reject(kernel: str) -> bool:
    """Excludes the configurations of a kernel that were found so far, as of one that failed its self-test; False where
    there are none: then the first candidate, or the recorded one, has failed."""
    wrong = {key: found for key, found in _found.items() if key[1].split()[0] == kernel}
    for key, found in wrong.items():
        _log.warning("%s %s: configuration %s fails the self-test; the next one is taken", *key, found)
        _rejected.add((key, found))
        del _found[key]
    return bool(wrong)


def current_gpu() -> str | None:
    """Name of the GPU with its compute capability and Triton's version; None on that of the tables, or without one."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() == MEASURED_ON:
        return None
    major, minor = torch.cuda.get_device_capability()
    return f"{torch.cuda.get_device_name()} {major}.{minor} triton {triton.__version__}"


def search(
    key: tuple[str, str], candidates: Sequence[Configuration], launch: Callable[[Configuration], Tensor]
) -> Configuration:
    """Times every candidate; returns the fastest and caches it on disk."""
    times: dict[Configuration, float] = {}
    first: Tensor | None = None
    for candidate in candidates:
        results: list[Tensor] = []
        try:
            duration = milliseconds(lambda candidate=candidate, results=results: results.append(launch(candidate)))
        except (RuntimeError, TritonError) as error:
            _log.info("%s %s: candidate %s failed: %s", *key, candidate, error)
            continue
        first = results[-1].clone() if first is None else first
        if not (error := difference(results[-1], first)) <= BOUND:
            _log.warning("%s %s: the result of candidate %s is off by %.1e; it is left out", *key, candidate, error)
            continue
        times[candidate] = duration
    if not times:
        return candidates[0]
    best = min(times, key=times.__getitem__)
    _log.info("%s %s: %s, %.3f ms", *key, best, times[best])
    write_cache(key, best)
    return best


def difference(x: Tensor, y: Tensor) -> float:
    """||x - y|| / ||y||."""
    return ((x.double() - y.double()).norm() / y.double().norm().clamp(min=1e-30)).item()


def milliseconds(call: Callable[[], object]) -> float:
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
    return cache_folder() / "tiles.json"


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
