"""Passes of kernels' self-tests on the disk, so that a later process on the same machine does not run them again.

One small file a pass, MEGALIN_CACHE/self_tests/HASH.json (~/.cache/megalin without that variable), whose content is the
key: op, backend, case, GPU, driver, versions and a hash of the source. Only the full text of the key is a pass; after
any other content, as of a damaged file, the test runs again. Failures are not kept, nor passes of Apex, whose version
does not change with its source.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import json
import logging
import os
from pathlib import Path

import torch

from megalin._triton.dispatch.cache_folder import cache_folder
from megalin.files import read_limited, write_atomically
from megalin.ops.dispatch.operands import Case

_FOLDERS = ("ops", "_triton")
_DRIVER = Path("/proc/driver/nvidia/version")

_log = logging.getLogger(__name__)


def has_passed(op: str, backend: str, case: Case) -> bool:
    """Whether a process with the same GPU, driver, versions and source has kept a pass of this test."""
    if backend == "apex":
        return False
    path, key = _entry(op, backend, case)
    try:
        return read_limited(path, limit_bytes=len(key), follow_links=True) == key
    except OSError:
        return False


def keep_pass(op: str, backend: str, case: Case) -> None:
    """Keeps a pass; in a folder that cannot be written, logs so once."""
    if backend == "apex":
        return
    path, key = _entry(op, backend, case)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, key)
    except BlockingIOError:  # another rank of this host is writing the same pass
        return
    except OSError as error:
        _warn(str(path.parent), str(error))


@functools.cache
def _warn(folder: str, error: str) -> None:
    _log.warning("%s: %s; kernels will be tested again at the next start", folder, error)


def _entry(op: str, backend: str, case: Case) -> tuple[Path, bytes]:
    """File of a pass and its content."""
    items = {name: str(value) for name, value in case}
    facts = {"op": op, "backend": backend, "case": items, "tiles": _tiles(backend), **_machine(backend)}
    key = json.dumps(facts, indent=1).encode()
    return cache_folder() / "self_tests" / f"{hashlib.sha256(key).hexdigest()[:32]}.json", key


@functools.cache
def _machine(backend: str) -> dict[str, str]:
    """The part of the key that is the same for all ops: GPU, driver, versions, and a hash of the source."""
    return {
        "gpu": f"{torch.cuda.get_device_name()} {torch.cuda.get_device_capability()}",
        "driver": f"{_driver()} CUDA {torch.version.cuda}",
        "torch": f"{torch.__version__} {torch.version.git_version}",
        "triton": importlib.import_module("triton").__version__ if backend == "triton" else "",
        "source": _source_digest(backend),
    }


def _tiles(backend: str) -> object:
    """Configurations of Triton kernels that were found by timing on this GPU."""
    if backend != "triton":
        return None
    from megalin._triton.dispatch import tuning

    return os.environ.get("MEGALIN_TUNE"), tuning.read_cache().get(gpu) if (gpu := tuning.current_gpu()) else None


def _driver() -> str:
    """NVIDIA's version of the kernel module, where the system shows it."""
    try:
        return _DRIVER.read_text("utf-8").splitlines()[0]
    except (OSError, IndexError):
        return ""


def _source_digest(backend: str) -> str:
    """sha256 of the sources of ops and Triton kernels, or for CUDA of the ops and the built extension."""
    root = Path(__file__).parents[2]
    paths = sorted(path for folder in _FOLDERS for path in (root / folder).resolve().rglob("*.py"))
    if backend == "cuda" and (extension := importlib.util.find_spec("megalin._C")) and extension.origin:
        paths.append(Path(extension.origin))
    digest = hashlib.sha256()
    for path in paths:
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()
