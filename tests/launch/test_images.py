"""Scripts of the container images: installation, accelerators and the smoke test."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.launch.hosts import BIN

ROOT = Path(__file__).parents[2]
# A fake interpreter that creates environments of itself and installs nothing, and the fake torch that it imports.
PYTHON = f"""#!/bin/sh
case "$*" in
*"-m venv"*) mkdir -p .venv/bin && cp "$0" .venv/bin/python ;;
*"-m pip"*) echo "pip $*" >>pip.log ;;
*) PYTHONPATH=. exec {sys.executable} "$@" ;;
esac
"""
TORCH = """
from types import SimpleNamespace
__version__ = {version!r}
version = SimpleNamespace(cuda={cuda!r})
cuda = SimpleNamespace(is_available=lambda: {gpu})
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder with the install scripts, a fake interpreter that installs nothing, and a torch for CPUs."""
    (tmp_path / "tools").mkdir()
    for name in ("tools/install.sh", "tools/accelerators.sh", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path / name)
    _write_python(tmp_path, PYTHON)
    (tmp_path / "torch.py").write_text(TORCH.format(version="2.13.0+cpu", cuda=None, gpu=False))
    return tmp_path


def _write_python(folder: Path, script: str) -> None:
    (folder / "python").write_text(script)
    (folder / "python").chmod(0o755)


def _run(*command: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=False)


def test_image_for_gpus_is_not_built_over_a_torch_without_cuda(checkout):
    done = _run(checkout / "tools" / "install.sh", checkout / "python", MEGALIN_REQUIRE_CUDA="1")
    assert done.returncode == 1
    assert "MEGALIN_REQUIRE_CUDA=1, but torch 2.13.0+cpu is built without CUDA; give pip an index" in done.stderr
    assert "dev" not in (checkout / "pip.log").read_text()


def test_image_for_gpus_is_not_built_without_kernels(checkout):
    (checkout / "torch.py").write_text(TORCH.format(version="2.13.0", cuda="13.0", gpu=False))
    (checkout / "megalin").mkdir()
    (checkout / "megalin" / "__init__.py").touch()
    (checkout / "megalin" / "_C.py").write_text("raise ImportError")
    done = _run(checkout / "tools" / "install.sh", checkout / "python", MEGALIN_REQUIRE_CUDA="1")
    assert done.returncode == 1
    assert "MEGALIN_REQUIRE_CUDA=1, but the CUDA kernels do not load" in done.stderr
    (checkout / "megalin" / "_C.py").write_text("")
    done = _run(checkout / "tools" / "install.sh", checkout / "python", MEGALIN_REQUIRE_CUDA="1")
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "install: done, torch 2.13.0")


def test_install_without_a_gpu_takes_the_pins(checkout):
    done = _run(checkout / "tools" / "install.sh", checkout / "python", MEGALIN_REQUIRE_CUDA="")
    assert done.returncode == 0, done.stderr
    first, second = (checkout / "pip.log").read_text().splitlines()
    assert first.endswith(" torch==2.13.0")
    assert second.endswith(" -c constraints.txt -e .[dev]")


def test_install_keeps_a_torch_that_finds_a_gpu(checkout):
    (checkout / "torch.py").write_text(TORCH.format(version="2.11.0+cu130", cuda="13.0", gpu=True))
    done = _run(checkout / "tools" / "install.sh", checkout / "python", MEGALIN_REQUIRE_CUDA="")
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "install: done, torch 2.11.0+cu130")
    assert "torch==" not in (checkout / "pip.log").read_text()


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ([], "nothing to build; name apex, flash-attn or both"),
        (["apex", "flash_attn"], "flash_attn: unknown; use apex or flash-attn"),
        (["apex"], "no .venv; run make install first"),
    ],
)
def test_accelerators_that_cannot_be_built_are_refused(checkout, names, message):
    done = _run(checkout / "tools" / "accelerators.sh", *names)
    assert (done.returncode, done.stderr) == (1, f"accelerators: {message}\n")


def test_accelerators_need_a_torch_with_cuda(checkout):
    subprocess.run([checkout / "python", "-m", "venv", ".venv"], cwd=checkout, check=True)
    done = _run(checkout / "tools" / "accelerators.sh", "apex", "flash-attn")
    message = "torch in .venv is built without CUDA, which these kernels need"
    assert (done.returncode, done.stderr) == (1, f"accelerators: {message}\n")
    assert not (checkout / "pip.log").exists()


def test_accelerators_are_built_from_pinned_sources_and_must_load(checkout):
    (checkout / "torch.py").write_text(TORCH.format(version="2.13.0", cuda="13.0", gpu=False))
    (checkout / "flash_attn.py").touch()
    subprocess.run([checkout / "python", "-m", "venv", ".venv"], cwd=checkout, check=True)
    done = _run(checkout / "tools" / "accelerators.sh", "flash-attn", "apex")
    assert (done.returncode, done.stderr.splitlines()[-1]) == (1, "ModuleNotFoundError: No module named 'amp_C'")
    _, flash_attn, apex = (checkout / "pip.log").read_text().splitlines()
    assert re.search(r"--no-build-isolation git\+https://\S+/flash-attention@[0-9a-f]{40}$", flash_attn)
    assert re.search(r"--no-build-isolation git\+https://\S+/NVIDIA/apex@[0-9a-f]{40}$", apex)


def test_smoke_test_passes_where_megalin_is_installed():
    done = _run(ROOT / "docker" / "smoke.sh", PATH=f"{BIN}:{os.environ['PATH']}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "PASSED" in done.stdout


def test_smoke_test_fails_without_the_kernels(tmp_path):
    _write_python(tmp_path, f'#!/bin/sh\n[ "$2" != "import megalin._C" ] && exec {sys.executable} "$@"\n')
    done = _run(ROOT / "docker" / "smoke.sh", PATH=f"{tmp_path}:{os.environ['PATH']}", MEGALIN_REQUIRE_CUDA="1")
    assert (done.returncode, done.stderr) == (1, "smoke: the CUDA kernels do not load\n")


def test_compose_describes_two_hosts_that_wait_for_their_data():
    services = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())["services"]
    assert services.keys() == {"data", "node1", "node2"}
    for name in ("node1", "node2"):
        assert services[name]["hostname"] == name
        assert services[name]["depends_on"] == {"data": {"condition": "service_completed_successfully"}}
        assert services[name]["volumes"] == services["data"]["volumes"]
    assert services["node1"]["command"] == services["node2"]["command"]
