"""The wheel: every file of the package, the kernels as files, the examples; it runs outside of the checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import megalin
from megalin.__main__ import main

ROOT = Path(__file__).parents[1]
_NOT_SOURCES = shutil.ignore_patterns(".*", "*.so", "__pycache__", "build", "dist", "runs", "*.egg-info", "*-data")
_IMPORT_ALL = """
import importlib, pathlib, pkgutil, sys
import megalin, megalin._triton
assert pathlib.Path(megalin.__file__).is_relative_to(sys.argv[1]), megalin.__file__
names = [module.name for module in pkgutil.walk_packages(megalin._triton.__path__, "megalin._triton.")]
for name in [*names, "megalin._index", "megalin.train.loop", "megalin.verify.run"]:
    importlib.import_module(name)
print(len(names))
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the checkout, in which a build may write."""
    folder = tmp_path_factory.mktemp("source") / "megalin"
    folder.mkdir()
    for name in ("csrc", "examples", "megalin", "tools"):
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=_NOT_SOURCES)
    for name in (
        "LICENSE",
        "README.md",
        "CHANGELOG.md",
        "MANIFEST.in",
        "pyproject.toml",
        "setup.py",
        "constraints.txt",
    ):
        shutil.copy(ROOT / name, folder / name)
    return folder


def _environment(**values: str) -> dict[str, str]:
    """This environment without the checkout on the path, as a user has it."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | values


def _kernels() -> set[str]:
    return {str(path.relative_to(ROOT / "csrc/triton")) for path in (ROOT / "csrc/triton").rglob("*.py")}


def test_a_build_has_kernels_as_files_data_and_examples(source: Path, tmp_path: Path):
    command = [sys.executable, "setup.py", "-q", "build_py", "--build-lib", str(tmp_path / "lib")]
    subprocess.run(command, cwd=source, env=_environment(), check=True, capture_output=True)
    built = tmp_path / "lib/megalin"
    files = {str(path.relative_to(built)) for path in built.rglob("*") if path.is_file()}
    assert not (built / "_triton").is_symlink()
    assert {name.removeprefix("_triton/") for name in files if name.startswith("_triton/")} == _kernels()
    for folder, pattern in (("", "**/*.py"), ("presets", "*.toml"), ("reproduce/papers", "*.toml")):
        own = (ROOT / "megalin" / folder).glob(pattern)
        assert {str(path.relative_to(ROOT / "megalin")) for path in own} <= files
    assert {"py.typed", "examples/quickstart/run.sh", "examples/recipes/hgrn2/common.toml"} <= files


@pytest.mark.slow
def test_the_wheel_trains_the_quickstart_outside_of_the_checkout(source: Path, tmp_path: Path):
    """All kernel modules are imported from it too. The libraries are those of this interpreter."""
    options = ["--no-deps", "--no-build-isolation", "--wheel-dir", str(tmp_path)]
    command = [sys.executable, "-m", "pip", "wheel", "-q", str(source), *options]
    subprocess.run(command, env=_environment(MEGALIN_CUDA="0"), check=True)
    (wheel,) = tmp_path.glob("megalin-*.whl")
    installed = tmp_path / "installed"
    zipfile.ZipFile(wheel).extractall(installed)
    metadata = next(installed.glob("*.dist-info/METADATA")).read_text()
    assert f"\nVersion: {megalin.__version__}\n" in metadata
    assert "\nLicense-Expression: Apache-2.0\n" in metadata
    environment = _environment(PYTHONPATH=str(installed))
    imported = subprocess.run(
        [sys.executable, "-c", _IMPORT_ALL, str(installed)],
        cwd=tmp_path,
        env=environment,
        check=True,
        capture_output=True,
        text=True,
    )
    modules = {name for name in _kernels() if Path(name).name != "__init__.py"}
    packages = {str(Path(name).parent) for name in _kernels() if "/" in name}
    assert int(imported.stdout) == len(modules) + len(packages)
    short = ["train.steps=40", "schedule.warmup_steps=8", "schedule.decay_steps=32"]
    quickstart = [sys.executable, "-m", "megalin", "quickstart", "--corpus-share", "0.05", *short]
    done = subprocess.run(quickstart, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert "== evaluation" in done.stdout, done.stdout + done.stderr
    assert (tmp_path / "runs/quickstart/evaluation.json").is_file()


def test_quickstart_runs_the_script_of_the_example(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd):
    script = tmp_path / "examples/quickstart/run.sh"
    script.parent.mkdir(parents=True)
    script.write_text('echo "$CORPUS_SHARE $*"; command -v python; exit 7\n')
    monkeypatch.setattr("megalin.commands.quickstart.megalin.__file__", str(tmp_path / "__init__.py"))
    assert main(["quickstart", "train.steps=5", "--corpus-share", "0.5"]) == 7
    shown = capfd.readouterr().out.splitlines()
    assert shown[0] == "0.5 train.steps=5"
    assert Path(shown[1]).parent == Path(sys.executable).parent
    assert main(["quickstart", "--corpus-share", "2"]) == 2
    script.unlink()
    assert main(["quickstart"]) == 2
    assert "installed without its examples" in capfd.readouterr().err
