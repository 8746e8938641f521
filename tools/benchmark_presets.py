"""Steps of many presets on the GPUs of this host, a process and a GPU each: the table of a lower-bounds page.

python tools/benchmark_presets.py FOLDER
python tools/benchmark_presets.py FOLDER --batch 2 --seconds 250 --presets hgrn2-1b danet-large
python tools/benchmark_presets.py FOLDER train.dtype=float16 --without-baselines
python tools/benchmark_presets.py FOLDER --within 540 --without-baselines gla-1.3b rodimus-1.3b

Each preset runs `benchmark_train --roofline` on one GPU: its steps as it trains, with CUDA graphs where they apply,
eager ones for both bounds, and another library's model. A preset goes to the next GPU that is free, the longest first;
every GPU has an equal share of the CPUs. A process that takes longer than --seconds is killed with its children; what
it had measured counts. With --within no process starts, or runs on, after so many seconds. FOLDER receives the output
of each process, steps.json with every result, and steps.md, which is also printed. Exit code 1 if a preset has no
result.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

LENGTH = 8192
BENCHMARK = Path(__file__).with_name("benchmark_train.py")


class PageModel(NamedTuple):
    """A preset, and how the page measures it."""

    name: str
    baseline: str = ""
    """Library with a model of this family."""
    overrides: tuple[str, ...] = ()
    note: str = ""
    """Variant of the preset, for the table."""
    batch: tuple[str, ...] = ()
    """Overrides of another batch than that of --batch."""

    @property
    def label(self) -> str:
        """Its name in the table."""
        return f"{self.name}, {self.note}" if self.note else self.name


_RMSNORM = tuple(f"model.{place}norm=rmsnorm" for place in ("", "layers.0.sublayers.0.", "layers.0.sublayers.1."))
PRESETS = (
    PageModel("mamba2-1b", "fla"),
    PageModel("hgrn2-1b", "fla"),
    PageModel("retnet-1.3b", "fla"),
    PageModel("tnl-1b", "fla"),
    PageModel("llama-1b", "transformers", _RMSNORM, "RMSNorm"),
    PageModel("cosformer2-1b", "fla"),
    PageModel("gla-1.3b", "fla"),
    PageModel("rodimus-1.3b", "fla"),
    PageModel("rodimus_plus-1.6b"),
    PageModel("transnormerllm-1b"),
    PageModel("llama-1b", note="LayerNorm"),
    PageModel("danet-large", note="64 x 512 tokens", batch=("train.micro_batch_size=64", "data.sequence_length=512")),
)
"""The longest runs first."""


class Measured(NamedTuple):
    """Result of a preset: the last JSON line of its process, empty without one."""

    preset: PageModel
    result: dict[str, Any]


class Runner:
    """Runs commands on one GPU, on its share of the CPUs, until `stop` is set."""

    def __init__(
        self, folder: Path, gpu: str, cpus: Sequence[int], seconds: float, end: float, stop: threading.Event
    ) -> None:
        self._folder, self._gpu, self._cpus, self._seconds, self._end = folder, gpu, cpus, seconds, end
        self._stop = stop

    def last_result(self, name: str, command: Sequence[str]) -> dict[str, Any]:
        """Runs `command` with its output in FOLDER/name.txt; the last line of JSON there, {} without one."""
        output, began = self._folder / f"{name}.txt", time.monotonic()
        seconds = min(self._seconds, self._end - began)
        if seconds <= 0:
            return {}
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": self._gpu, "OMP_NUM_THREADS": "4"}
        with output.open("wb") as sink:
            process = subprocess.Popen(
                command, stdout=sink, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )
            os.sched_setaffinity(process.pid, self._cpus)
            while process.poll() is None and time.monotonic() < began + seconds and not self._stop.wait(0.1):
                pass
            code = str(process.poll())
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
                code = f"killed by {process.wait()}"
        print(f"GPU {self._gpu}: {name}: {code} after {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
        return last_json(output.read_text(errors="replace"))

    def measure(self, preset: PageModel, arguments: argparse.Namespace) -> Measured:
        """Runs the process of a preset."""
        batch = preset.batch or (f"train.micro_batch_size={arguments.batch}", f"data.sequence_length={LENGTH}")
        settings = (*batch, *preset.overrides, "train.compile=true", *arguments.overrides)
        command = [sys.executable, str(BENCHMARK), preset.name, *settings]
        command += ["--warmup", "4", "--steps", str(arguments.steps), "--roofline"]
        if preset.baseline and preset.name not in arguments.without_baselines:
            command += ["--baseline", preset.baseline]
        return Measured(preset, self.last_result(re.sub(r"[^\w.]+", "-", preset.label), command))


def last_json(text: str) -> dict[str, Any]:
    """The last line of `text` that is a JSON object."""
    for line in reversed(text.splitlines()):
        if line.startswith("{"):
            try:
                return dict(json.loads(line))
            except ValueError:
                continue
    return {}


def measure_all(presets: Sequence[PageModel], gpus: Sequence[str], arguments: argparse.Namespace) -> list[Measured]:
    """Measures the presets on the GPUs, each by its own thread; in the order of `presets`. Ctrl-C kills what runs."""
    waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
    for index in range(len(presets)):
        waiting.put(index)
    found: dict[int, Measured] = {}
    cpus = sorted(os.sched_getaffinity(0))
    share, end, stop = max(1, len(cpus) // len(gpus)), time.monotonic() + arguments.within, threading.Event()

    def work(number: int) -> None:
        mine = cpus[number * share : (number + 1) * share] or cpus
        runner = Runner(arguments.folder, gpus[number], mine, arguments.seconds, end, stop)
        while not stop.is_set():
            try:
                index = waiting.get_nowait()
            except queue.Empty:
                return
            found[index] = runner.measure(presets[index], arguments)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(gpus))]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    finally:
        stop.set()
    return [found[index] for index in range(len(presets))]


def table(measured: Sequence[Measured]) -> str:
    """Markdown: steps against both bounds, then against the other libraries' models."""
    lines = [
        "| model | step | tokens/s | eager step | of the bound with its own mixing | of the bound with mixing at its "
        "roofline | mixing: time, roofline | memory |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    others = [
        "| model | the other library's model | its step, other forms | memory | megalin is faster by |",
        "| --- | --- | --- | --- | --- |",
    ]
    for each in measured:
        lines.append(f"| {each.preset.label} | {' | '.join(_step_cells(each.result))} |")
        if baseline := each.result.get("baseline"):
            others.append(f"| {each.preset.label} | {' | '.join(_baseline_cells(each.result, baseline))} |")
    return "\n".join([*lines, "", *others, ""])


def _step_cells(result: Mapping[str, Any]) -> list[str]:
    if not result:
        return ["-"] * 7
    step, eager = result["step_seconds_median"] * 1e3, result["eager_step_seconds_median"] * 1e3
    low, high = result["step_seconds_min_max"]
    graph = ", CUDA graph" if result["cuda_graphs"] else ""
    parts = result["roofline_parts_milliseconds"]
    bounds = [result[f"{name}_milliseconds"] for name in ("roofline", "lower_bound")]
    return [
        f"{step:.1f} ms ({low * 1e3:.1f} to {high * 1e3:.1f}){graph}",
        f"{result['tokens_per_second'] / 1e3:.1f}k",
        f"{eager:.1f} ms",
        *(f"{bound:.1f} ms, {bound / min(eager, step):.0%}" for bound in bounds),
        f"{parts['mixing']:.1f}, {parts['mixing_at_its_roofline']:.1f} ms",
        f"{result['peak_memory_gib']:.1f} GiB",
    ]


def _baseline_cells(result: Mapping[str, Any], baseline: Mapping[str, Any]) -> list[str]:
    step = baseline["step_seconds_median"]
    slower = ", ".join(f"{name} {seconds * 1e3:.1f}" for name, seconds in baseline.get("slower_variants", {}).items())
    ours = min(result["step_seconds_median"], result["eager_step_seconds_median"])
    return [
        f"{baseline['library']}'s {baseline['class']}, {baseline.get('variant', 'its scan')}",
        f"{step * 1e3:.1f} ms" + f" ({slower})" * bool(slower),
        f"{baseline['peak_memory_gib']:.1f} GiB",
        f"{step / ours:.2f}x",
    ]


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    names = sorted({preset.name for preset in PRESETS})
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="for the output; made if it does not exist")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="for every preset")
    parser.add_argument("--presets", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--batch", type=int, default=4, help=f"sequences of {LENGTH} tokens a step (4)")
    parser.add_argument("--steps", type=int, default=12, help="timed steps (12)")
    parser.add_argument("--seconds", type=float, default=300.0, help="longest time of a process (300)")
    parser.add_argument("--within", type=float, default=math.inf, help="seconds until all processes have ended (any)")
    parser.add_argument("--gpus", nargs="+", metavar="N", help="GPUs to use (all)")
    parser.add_argument(
        "--without-baselines", nargs="*", choices=names, metavar="NAME", help="no other library for these (for all)"
    )
    parsed = parser.parse_intermixed_args(arguments)
    without = parsed.without_baselines
    parsed.without_baselines = names if without == [] else without or []
    return parsed


def main(given: list[str] | None = None) -> int:
    """Runs the tool; returns 0 if every preset has a result."""
    arguments = parse_arguments(given)
    gpus = arguments.gpus or _visible_gpus()
    if not gpus:
        print("benchmark_presets: no GPU is visible; run it on a host that has one", file=sys.stderr)
        return 2
    arguments.folder.mkdir(parents=True, exist_ok=True)
    measured = measure_all([each for each in PRESETS if each.name in arguments.presets], gpus, arguments)
    results = {each.preset.label: each.result for each in measured}
    (arguments.folder / "steps.json").write_text(json.dumps(results, indent=1) + "\n")
    (arguments.folder / "steps.md").write_text(table(measured))
    print(table(measured))
    return int(not all(each.result for each in measured))


def _visible_gpus() -> list[str]:
    import torch

    return [str(number) for number in range(torch.cuda.device_count())]


if __name__ == "__main__":
    raise SystemExit(main())
