"""Compiles representative launches of every Triton kernel ahead of time, without a GPU; runs as its own module.

python -m tests.ops.aot [--first] [MODULE ...]: one JSON line a launch: registers, stack (spills), shared memory.
--first compiles the first launch of each module only.
"""

import argparse
import importlib
import itertools
import json
import pkgutil
import re
import subprocess
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import megalin._triton

SHARED_LIMIT = {80: 166912, 90: 232448}
SPILL_LIMIT = 16
"""Limit of the bytes of stack a thread: above it a kernel spills more than a pointer or two."""
SPILLS: dict[tuple[str, str, str], int] = {
    # Faster than tiles that do not spill, by measurement: docs/benchmarks/2026-11-21-h200-kernels.md.
    ("scans.fixed_decay", "scan_kernel", "bf16[1, 1, 32, 256]"): 168,
    ("scans.fixed_decay", "scan_kernel", "fp32[1, 1, 32, 128]"): 344,
    # Steep decays and fp32 run rarely.
    ("scans.vector_decay", "scores_kernel", "bf16"): 72,
    ("scans.vector_decay", "gradients_kernel", "bf16"): 520,
    ("scans.vector_decay", "scores_kernel", "fp32"): 1080,
    ("scans.vector_decay", "gradients_kernel", "fp32"): 1240,
    ("scans.vector_decay", "forward_kernel", "fp32"): 1200,
    ("scans.vector_decay", "reverse_kernel", "fp32"): 1256,
}
"""Known bytes of stack a thread with Triton 3.7.1, by (module, kernel, type of its first argument)."""


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
        "operand": types[names[0]].removeprefix("tensordesc<").strip("*>"),
        "wgmma": "wgmma" in compiled.asm["ptx"],
        "constants": {name: str(value) for name, value in constants.items()},
        "options": options,
    }


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("modules", nargs="*")
    parser.add_argument("--first", action="store_true")
    arguments = parser.parse_args()
    prefix = "megalin._triton."
    walked = (module.name.removeprefix(prefix) for module in pkgutil.walk_packages(megalin._triton.__path__, prefix))
    for name in arguments.modules or sorted(walked):
        module = importlib.import_module(prefix + name)
        cases = getattr(module, "compile_cases", list)()
        for case in itertools.islice(cases, 1 if arguments.first else None):
            print(json.dumps({"module": name, **compile_launch(*case, arch=90)}), flush=True)


if __name__ == "__main__":
    main()
