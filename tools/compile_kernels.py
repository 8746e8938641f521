"""Compiles the kernels ahead of time, without a GPU: recorded launches of Triton kernels, and every .cu of csrc/cuda.

    python tools/compile_kernels.py                                      # every launch for its chips
    python tools/compile_kernels.py --arch 90 100 --op vector_decay_scan
    python tools/compile_kernels.py --changed --seal                     # after a change of a kernel or of the launches

A launch fails if it does not compile, takes more shared memory than a thread block of the chip has, or spills more than
the list says. The dispatcher's own launches for each chip are in the list, so none is skipped. `--seal` writes to
tools/kernel_launches/launches.txt that the kernels' present source compiles, and what it spills: read the difference.
"""

from __future__ import annotations

import argparse
import math
import os
import resource
import sys

os.environ.pop("TRITON_INTERPRET", None)  # compiles, does not interpret

from kernel_launches import cuda_sources
from kernel_launches.compilation import SPILL_LIMIT, compile_launch
from kernel_launches.launch import CHIPS
from kernel_launches.launch_list import LaunchList
from kernel_launches.ops import OPS, is_of_op


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", nargs="+", type=int, choices=CHIPS, default=list(CHIPS), help="default: all")
    parser.add_argument("--op", nargs="+", choices=sorted(OPS), default=sorted(OPS), help="default: all")
    parser.add_argument("--changed", action="store_true", help="only kernels whose source or launches changed, no .cu")
    parser.add_argument("--cpu-seconds", type=float, metavar="N", help="fail after these")
    parser.add_argument("--seal", action="store_true", help="write seals and spills of kernels without another failure")
    parser.add_argument("--quiet", action="store_true", help="print failures alone")
    return parser.parse_args()


def cpu_seconds() -> float:
    """CPU time of this process and of the assemblers that it ran."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


Work = dict[str, list[int]]
"""Chips by kernel."""


def select(launches: LaunchList, chips: list[int], ops: list[str], *, changed: bool) -> Work:
    """Kernels of `ops` with the chips to compile them for."""
    kernels = [kernel for kernel in launches.kernels() if any(is_of_op(kernel, op) for op in ops)]
    if not changed:
        return dict.fromkeys(kernels, chips)
    stale = {chip: set(launches.changed(chip)) for chip in chips}
    work = {kernel: [chip for chip in chips if kernel in stale[chip]] for kernel in kernels}
    return {kernel: own for kernel, own in work.items() if own}


def compile_kernel(launches: LaunchList, kernel: str, chip: int, limit: float, arguments: argparse.Namespace) -> bool:
    """Compiles the launches of a kernel for a chip; False where one fails.

    Raises:
        TimeoutError: this process has used more than `limit` CPU seconds.
    """
    passed = True
    for launch in launches.of_kernel(kernel):
        entry = launches.entries[launch]
        if chip not in entry.chips:
            continue
        if cpu_seconds() > limit:
            raise TimeoutError
        result = compile_launch(launch, chip)
        if arguments.seal and not result.error:
            entry.spills.pop(chip, None)
            if result.stack > SPILL_LIMIT:
                entry.spills[chip] = result.stack
        if problem := result.problem(chip, entry.spills):
            passed = False
            print(f"sm_{chip} {kernel}: FAILED {problem}\n    {launch.text}", flush=True)
        elif not arguments.quiet:
            print(f"sm_{chip} {kernel}: {result.shared} bytes shared, {result.stack} bytes spilled", flush=True)
    return passed


def compile_cuda(arguments: argparse.Namespace) -> bool:
    """Compiles the .cu files of the chosen ops; False where one fails."""
    passed = True
    for source in cuda_sources.sources():
        for chip in arguments.arch if source.stem in arguments.op else []:
            problem = cuda_sources.problem_of(source, chip)
            passed &= not problem
            if problem or not arguments.quiet:
                print(
                    f"sm_{chip} csrc/cuda/{source.name}: {f'FAILED {problem}' if problem else 'compiled'}", flush=True
                )
    return passed


def main() -> None:
    arguments = parse_arguments()
    launches = LaunchList.read()
    work = select(launches, arguments.arch, arguments.op, changed=arguments.changed)
    limit = math.inf if arguments.cpu_seconds is None else cpu_seconds() + arguments.cpu_seconds
    passed = True
    try:
        for kernel, chips in work.items():
            sound = [chip for chip in chips if compile_kernel(launches, kernel, chip, limit, arguments)]
            passed &= sound == chips
            if arguments.seal and sound:
                launches.seal(kernel, sound)
                launches.write()
    except TimeoutError:
        raise SystemExit(
            f"{len(work)} kernels changed, more than {arguments.cpu_seconds:.0f} CPU seconds can compile: run "
            "`python tools/compile_kernels.py --changed --seal` and commit the list"
        ) from None
    if not arguments.changed:
        passed &= compile_cuda(arguments)
    sys.exit(not passed)


if __name__ == "__main__":
    main()
