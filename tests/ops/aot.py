"""Compiles every Triton kernel's representative launches ahead of time, without a GPU; run as a module of its own.

python -m tests.ops.aot [MODULE ...]: one JSON line a launch: registers, stack (spills), shared memory.
"""

import importlib
import json
import pkgutil
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import megalin._triton

SHARED_LIMIT = {80: 166912, 90: 232448}


def compile_launch(kernel, signature, constants, options, arch):
    """Resources of one launch: `signature` types the arguments, `constants` are the constexpr ones."""
    names = kernel.arg_names
    types = {name: "constexpr" if name in constants else signature[name] for name in names}
    aligned = {(names.index(n),): [["tt.divisibility", 16]] for n, t in types.items() if t.startswith("*")}
    source = ASTSource(
        fn=kernel,
        signature=types,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs=aligned,
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        report = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", report.stdout).groups()
    return {
        "kernel": kernel.__name__,
        "arch": arch,
        "registers": int(registers),
        "stack": int(stack),
        "shared": compiled.metadata.shared,
        "wgmma": "wgmma" in compiled.asm["ptx"],
        "constants": {name: str(value) for name, value in constants.items()},
        "options": options,
    }


def main(modules):
    for name in modules or sorted(module.name for module in pkgutil.iter_modules(megalin._triton.__path__)):
        module = importlib.import_module(f"megalin._triton.{name}")
        for case in getattr(module, "compile_cases", list)():
            print(json.dumps({"module": name, **compile_launch(*case, arch=90)}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
