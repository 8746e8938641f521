"""Times the ops on one GPU, against their roofline and the installed baselines.

python tools/benchmark_ops.py --ops srmsnorm max_norm --json ops.json --png ops.png

Every implementation first passes a gate of values, gradients and determinism; one that fails gets no ratio. The
roofline of a time is bytes over the copy bandwidth or operations over the bf16 matrix rate, whichever is larger, both
from this run.
"""

from __future__ import annotations

import argparse
import importlib
import json
import pkgutil
import subprocess
from pathlib import Path

import benchmarks
import torch
import torch._functorch.config
import triton
import triton.testing
from benchmarks.case import BenchmarkCase, KernelTiming, gate, measure

OURS, BASELINES = 2.0, 10.0
"""Factors by which errors may exceed the reference's own; the baselines' only shows that they compute the same."""
DIRECTIONS = ("forward", "backward", "both")
STEP = "step"
"""The direction of ops without a backward."""
BenchmarkRow = dict[str, object]


def parse_arguments() -> argparse.Namespace:
    known = sorted(m.name for m in pkgutil.iter_modules(benchmarks.__path__) if m.name != "case")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ops", nargs="+", choices=known, default=known, help="default: all")
    parser.add_argument("--shapes", default="", metavar="TEXT", help="only the shapes that contain this")
    parser.add_argument(
        "--without-compiled", action="store_true", help="do not time the reference compiled by inductor"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all results there")
    parser.add_argument("--png", type=Path, metavar="FILE", help="write a plot there")
    return parser.parse_args()


def ceilings() -> dict[str, float]:
    """Bytes read and written a second by a copy of 1 GiB, bf16 operations a second by a matmul of 8192^3."""
    source = torch.randn(2**29, device="cuda").bfloat16()
    target, a, b = torch.empty_like(source), *source[: 2**27].view(2, 8192, 8192)
    copy = triton.testing.do_bench(lambda: target.copy_(source), rep=200, quantiles=[0.5])
    matmul = triton.testing.do_bench(lambda: a @ b, rep=200, quantiles=[0.5])
    return {"bytes": 2 * source.nbytes / copy * 1e3, "flops": 2 * 8192**3 / matmul * 1e3}


def environment() -> dict[str, str]:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    versions = {"torch": torch.__version__, "triton": triton.__version__, "commit": commit.stdout.strip()}
    return {"device": torch.cuda.get_device_name(), **versions}


def rows_of(case: BenchmarkCase, limits: dict[str, float], *, compile_reference: bool) -> list[BenchmarkRow]:
    """One row per implementation and direction, ours first."""
    implementations = {**case.ours, "reference": case.reference}
    if compile_reference and case.compiled:
        torch._dynamo.reset()
        implementations["inductor"] = torch.compile(case.reference, fullgraph=True, dynamic=False)
    implementations |= case.baselines
    errors, timings = {}, {}
    for name, function in implementations.items():
        errors[name] = (
            "" if name == "reference" else gate(function, case, factor=OURS if name in case.ours else BASELINES)
        )
        timings[name] = measure(function, case)
        torch.cuda.empty_cache()
    ours = next(iter(case.ours))
    rows: list[BenchmarkRow] = []
    for direction in _directions(case):
        roofline = _roofline_milliseconds(case, limits, direction)
        for name, timing in timings.items():
            milliseconds, green = _milliseconds(timing, direction), not errors[name] and not errors[ours]
            rows.append(
                {
                    "op": case.op,
                    "shape": case.shape,
                    "direction": direction,
                    "implementation": name,
                    "milliseconds": milliseconds,
                    "roofline_milliseconds": roofline,
                    "roofline_fraction": roofline / milliseconds if not errors[name] else None,
                    "times_ours": milliseconds / _milliseconds(timings[ours], direction) if green else None,
                    "peak_bytes": timing.peak_bytes,
                    "error": errors[name],
                }
            )
    return rows


def _directions(case: BenchmarkCase) -> tuple[str, ...]:
    if not case.differentiable:
        return (STEP,)
    return DIRECTIONS if case.retained else DIRECTIONS[-1:]


def _milliseconds(timing: KernelTiming, direction: str) -> float:
    both = timing.forward + timing.backward
    return {"forward": timing.forward, "backward": timing.backward}.get(direction, both)


def _roofline_milliseconds(case: BenchmarkCase, limits: dict[str, float], direction: str) -> float:
    bounds = [max(b / limits["bytes"], f / limits["flops"]) * 1e3 for b, f in zip(case.bytes, case.flops, strict=True)]
    return {"forward": bounds[0], "backward": bounds[1]}.get(direction, sum(bounds))


def show(rows: list[BenchmarkRow]) -> None:
    """Prints the rows of one case."""
    for row in rows:
        fraction, ratio = row["roofline_fraction"], row["times_ours"]
        print(
            f"{row['op']:<16}{row['shape']:<30}{row['direction']:<9}{row['implementation']:<18}"
            f"{row['milliseconds']:>9.4f}{row['roofline_milliseconds']:>9.4f}"
            f"{'' if fraction is None else f'{fraction:.0%}':>7}{'' if ratio is None else f'{ratio:.2f}x':>8}"
            f"{row['peak_bytes'] / 2**30:>8.2f}  {'FAILED: ' + str(row['error']) if row['error'] else ''}".rstrip(),
            flush=True,
        )


def plot(rows: list[BenchmarkRow], path: Path) -> None:
    """Plots roofline over time, forward and backward together or a step: a bar per implementation, a group per case."""
    from matplotlib.figure import Figure

    both = [row for row in rows if row["direction"] in ("both", STEP) and row["roofline_fraction"] is not None]
    groups = list(dict.fromkeys((row["op"], row["shape"]) for row in both))
    names = list(dict.fromkeys(row["implementation"] for row in both))
    figure = Figure(figsize=(10, 1.2 + 0.14 * (len(both) + 2 * len(groups))), layout="constrained")
    axes = figure.subplots()
    place, ticks = 0.0, []
    for group in groups:
        members = [row for row in both if (row["op"], row["shape"]) == group]
        ticks.append(place + (len(members) - 1) / 2)
        for row in members:
            axes.barh(place, row["roofline_fraction"], color=f"C{names.index(row['implementation']) % 10}")
            place += 1
        place += 1.5
    axes.set_yticks(ticks, [f"{op} {shape}" for op, shape in groups], fontsize=7)
    axes.invert_yaxis()
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_xlabel("roofline / time, forward and backward or a step (1 = the limit of this GPU)")
    axes.legend([axes.barh(0, 0, color=f"C{i % 10}") for i in range(len(names))], names, fontsize=7)
    figure.savefig(path, dpi=150)


def main() -> None:
    arguments = parse_arguments()
    if not torch.cuda.is_available():
        raise SystemExit("tools/benchmark_ops.py needs a CUDA device; none is visible")
    # The backward is repeated on the tensors of one forward.
    torch._functorch.config.donated_buffer = False
    limits, place = ceilings(), environment()
    print(" ".join(f"{name}={value}" for name, value in place.items()))
    print(f"copy {limits['bytes'] / 1e12:.2f} TB/s, bf16 matmul {limits['flops'] / 1e12:.0f} TFLOP/s")
    print(f"{'op':<16}{'shape':<30}{'':<9}{'':<18}{'ms':>9}{'roofline':>9}{'of it':>7}{'/ours':>8}{'GiB':>8}")
    rows: list[BenchmarkRow] = []
    for op in arguments.ops:
        for case in importlib.import_module(f"benchmarks.{op}").cases():
            if arguments.shapes in case.shape:
                found = rows_of(case, limits, compile_reference=not arguments.without_compiled)
                show(found)
                rows += found
    if arguments.json:
        arguments.json.write_text(json.dumps({"environment": place, "ceilings": limits, "rows": rows}, indent=1))
    if arguments.png:
        plot(rows, arguments.png)
    if any(row["error"] and row["implementation"] == "auto" for row in rows):
        raise SystemExit("an op failed its gate: see FAILED above")


if __name__ == "__main__":
    main()
