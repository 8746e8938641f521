"""Builds the extensions: the index builder (csrc/cpu), and the CUDA kernels (csrc/cuda) where they are wanted.

MEGALIN_CUDA=1 compiles the CUDA kernels with nvcc, 0 does not; without it they are compiled where nvcc is installed and
the torch of this interpreter is built with CUDA. MEGALIN_REQUIRE_CUDA=1 makes a missing nvcc an error (images for
clusters); MEGALIN_CUDA_ARCHITECTURES names the architectures, "80;90a" by default. The Triton kernels are Python files
and always there. A wheel also has examples/ as megalin/examples.
"""

import hashlib
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pybind11.setup_helpers import Pybind11Extension, build_ext
from setuptools import setup
from setuptools.command.build_py import build_py

CUDA_SOURCES = sorted(str(path) for path in Path("csrc/cuda").glob("*.cu"))
CUDA_HEADERS = sorted(str(path) for path in Path("csrc/cuda").glob("*.cuh"))


def nvcc() -> Path | None:
    """The CUDA compiler: in CUDA_HOME, else on the path."""
    home = os.environ.get("CUDA_HOME")
    found = shutil.which("nvcc", path=f"{home}/bin") if home else shutil.which("nvcc")
    if found is None and os.environ.get("MEGALIN_REQUIRE_CUDA") == "1":
        raise SystemExit("MEGALIN_REQUIRE_CUDA=1, but no nvcc was found; set CUDA_HOME, or add nvcc to the path")
    return Path(found).resolve() if found else None


def wants_cuda() -> bool:
    """Decides whether to compile the CUDA kernels, and says so in one line."""
    choice = "1" if os.environ.get("MEGALIN_REQUIRE_CUDA") == "1" else os.environ.get("MEGALIN_CUDA")
    if choice is not None:
        wanted, reason = choice == "1", f"MEGALIN_CUDA={choice}"
    else:
        # Not an import, which takes seconds. An isolated build sees no torch of the environment.
        version = next((file for path in sys.path if (file := Path(path or ".", "torch/version.py")).is_file()), None)
        text = "" if version is None else version.read_text(encoding="utf-8")
        wanted = re.search(r"^cuda(: [^=]+)? = ['\"]", text, re.MULTILINE) is not None
        reason = "this build sees no torch" if version is None else f"torch with{'' if wanted else 'out'} CUDA"
    if wanted and nvcc() is None:
        wanted, reason = False, f"{reason}, but no nvcc"
    said = "compiled by nvcc" if wanted else "left out, MEGALIN_CUDA=1 compiles them; those of Triton need no build"
    print(f"megalin: CUDA kernels {said} ({reason})", file=sys.stderr)
    return wanted


class BuildModules(build_py):
    """setuptools' build, with the examples, and not for an editable install, which finds them beside the package."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            target = Path(self.build_lib) / "megalin/examples"
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree("examples", target, ignore=shutil.ignore_patterns("__pycache__"))


class BuildExtensions(build_ext):
    """pybind11's build, with .cu files compiled by nvcc into objects first. The kernels include no torch header."""

    def build_extension(self, extension: Pybind11Extension) -> None:
        if extension.name == "megalin._C":
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                extension.extra_objects = list(pool.map(self.compile_cuda, CUDA_SOURCES))
        super().build_extension(extension)

    def compile_cuda(self, source: str) -> str:
        compiler = nvcc()
        assert compiler is not None
        target = Path(self.build_temp) / Path(source).with_suffix(".cu.o").name
        target.parent.mkdir(parents=True, exist_ok=True)
        architectures = os.environ.get("MEGALIN_CUDA_ARCHITECTURES", "80;90a").split(";")
        # Code of an architecture with an "a" runs there only; that of the others is kept as PTX for later GPUs too.
        codes = {a: f"sm_{a}" if a.endswith("a") else f"[sm_{a},compute_{a}]" for a in architectures}
        targets = [f"-gencode=arch=compute_{a},code={code}" for a, code in codes.items()]
        options = ["-std=c++17", "-O3", "-Werror=all-warnings", "-Xcompiler=-fPIC,-fvisibility=hidden"]
        subprocess.run([compiler, *options, *targets, "-c", source, "-o", target], check=True)
        return str(target)


def built_from(folder: str) -> list[tuple[str, str]]:
    """The macro with the sha256 of an extension's sources, which a run compares (megalin/train/identity.py)."""
    contents = b"".join(path.read_bytes() for path in sorted(Path(folder).iterdir()))
    return [("MEGALIN_SOURCES", f'"{hashlib.sha256(contents).hexdigest()}"')]


def extensions() -> list[Pybind11Extension]:
    """The index builder always, the kernels where they can be compiled."""
    # A blend's order is decided by rounded sums, so no product may be fused into one.
    options = ["-O3", "-ffp-contract=off"]
    found = [
        Pybind11Extension(
            "megalin._index",
            ["csrc/cpu/index.cpp", "csrc/cpu/packing.cpp"],
            cxx_std=17,
            define_macros=built_from("csrc/cpu"),
            extra_compile_args=options,
            depends=["csrc/cpu/packing.hpp"],
        )
    ]
    if CUDA_SOURCES and wants_cuda() and (compiler := nvcc()) is not None:
        toolkit = toolkit_folder(compiler)
        target = toolkit / "targets/x86_64-linux"
        found.append(
            Pybind11Extension(
                "megalin._C",
                ["csrc/cuda/bindings.cpp"],
                cxx_std=17,
                define_macros=built_from("csrc/cuda"),
                libraries=["cudart_static", "dl", "rt", "pthread"],
                include_dirs=[str(target / "include"), str(toolkit / "include")],
                library_dirs=[str(target / "lib"), str(toolkit / "lib64")],
                depends=[*CUDA_SOURCES, *CUDA_HEADERS],
            )
        )
    return found


def toolkit_folder(compiler: Path) -> Path:
    """The toolkit's folder, from a dry run of the compiler: nvcc on the path may be a wrapper."""
    result = subprocess.run([compiler, "--dryrun", "-c", CUDA_SOURCES[0]], capture_output=True, text=True, check=True)
    top = next(line for line in result.stderr.splitlines() if line.startswith("#$ TOP="))
    return Path(top.partition("=")[2]).resolve()


setup(ext_modules=extensions(), cmdclass={"build_ext": BuildExtensions, "build_py": BuildModules})
