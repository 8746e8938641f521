"""`megalin plan`: the layouts of a model on a number of GPUs, with memory and step time, and the rejected ones."""

from __future__ import annotations

import argparse
import json
import math
import re
import shlex
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from megalin.commands.base import model_from
from megalin.commands.progress import progress_bars
from megalin.config import read_toml
from megalin.errors import ConfigError
from megalin.evaluation.in_loop import check_run
from megalin.model.config import ModelConfig
from megalin.model.language_model import LanguageModel
from megalin.parallel.config import ParallelConfig
from megalin.parallel.float8_layers import check_capability
from megalin.planner.estimate import Estimate, Estimator
from megalin.planner.hardware import GPUS_PER_HOST, Hardware, hardware_named
from megalin.planner.longest import LongestPlan, longest_sequences
from megalin.planner.search import InfeasibleLayout, Limits, Plan, search, usable_bytes
from megalin.planner.workload import Workload, workload_of
from megalin.train.config import load_run_config

_UNITS = {"GB": 10**9, "GiB": 2**30}


def run(arguments: argparse.Namespace) -> int:
    """Runs the command and returns the exit code."""
    for name in ("gpus", "length", "global_batch_size", "top"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {value}: use at least 1")
    hardware = _hardware(arguments)
    memory = hardware.memory_bytes
    workload, parallel = _workload_and_mesh(arguments)
    if workload.float8 is not None:
        check_capability(hardware.name, hardware.capability)
    sequence_parallel = arguments.sequence_parallel or parallel.sequence_parallel
    limits = Limits(arguments.gpus, usable_bytes(memory), sequence_parallel, parallel.tp_overlap)
    if arguments.longest:
        with _counted_estimates() as on_estimate:
            longest = longest_sequences(workload, hardware, limits, count=arguments.top, on_estimate=on_estimate)
        if arguments.json:
            print(json.dumps(_longest_json(arguments, workload, hardware, memory, longest)))
        else:
            _print_longest(arguments, workload, hardware, memory, longest)
        return 0 if longest.best else 1
    with _counted_estimates() as on_estimate:
        plan = search(Estimator(workload, hardware, on_estimate=on_estimate), limits, count=arguments.top)
    if arguments.json:
        print(json.dumps(_as_json(arguments, workload, hardware, memory, plan)))
    else:
        _print(arguments, workload, hardware, memory, plan)
    return 0 if plan.best else 1


def _workload_and_mesh(arguments: argparse.Namespace) -> tuple[Workload, ParallelConfig]:
    """The workload to plan, and the run config's mesh: the search takes sequence parallelism and its overlap from it.
    Length and batch are those of the command line, else of the run's config, else the defaults.

    Raises:
        ConfigError: the config is invalid or refused at training, or its model is an encoder.
    """
    name, length, batch = arguments.model, arguments.length, arguments.global_batch_size
    is_run = name.endswith(".toml") and "train" in read_toml(name)
    run = load_run_config(name, arguments.overrides) if is_run else None
    if run is not None:
        check_run(run.model_copy(update={"parallel": ParallelConfig()}))  # the search chooses the mesh
    model = model_from(name, arguments.overrides) if run is None else run.model
    if not isinstance(model, ModelConfig):
        raise ConfigError(f'{name}: model.kind = "encoder", but only decoders can be planned; give a decoder')
    if run is None:
        workload = Workload(model, 8192, 4 * arguments.gpus, torch.bfloat16, compiled=True)
    else:
        workload = workload_of(run, model)
    workload = workload._replace(
        length=length or workload.length,
        global_batch_size=batch or workload.global_batch_size,
        compiled=workload.compiled and not arguments.eager,
    )
    return workload, ParallelConfig() if run is None else run.parallel


def _hardware(arguments: argparse.Namespace) -> Hardware:
    """The GPU model of --gpu with the figures that the other options give. Raises ConfigError for impossible ones."""
    hardware = hardware_named(arguments.gpu)
    figures = {"gpu_tflops": "matrix_flops", "bandwidth": "memory_bandwidth"}
    figures |= {"link_bandwidth": "link_bandwidth", "network_bandwidth": "network_bandwidth"}
    given: dict[str, Any] = {}
    for option, field in figures.items():
        value = getattr(arguments, option)
        if value is None:
            continue
        if not (math.isfinite(value) and value > 0):
            raise ConfigError(f"--{option.replace('_', '-')} {value:g}: use a positive number")
        given[field] = value * (1e12 if option == "gpu_tflops" else 1e9)
    if given:
        given["name"] = "GPU with " + ", ".join(_figure_texts(hardware._replace(**given)))
    if arguments.gpu_memory is not None:
        given["memory_bytes"] = _parse_memory(arguments.gpu_memory)
    return hardware._replace(**given)


def _figure_texts(hardware: Hardware) -> Iterator[str]:
    """The figures of a GPU that is none of the known ones; those that no option gave are the GPU model's."""
    yield f"{hardware.matrix_flops / 1e12:g} TFLOP/s"
    yield f"{hardware.memory_bandwidth / 1e9:g} GB/s of memory"
    yield f"{hardware.link_bandwidth / 1e9:g} GB/s of links"
    yield f"{hardware.network_bandwidth / 1e9:g} GB/s of network"


@contextmanager
def _counted_estimates() -> Iterator[Callable[[], None]]:
    """Yields a callback that shows the number of its calls so far as progress."""
    number = 0
    with progress_bars() as report:

        def on_estimate() -> None:
            nonlocal number
            number += 1
            report("estimates of layouts", number, None)

        yield on_estimate


def _parse_memory(text: str) -> int:
    """Parses 80GB or 75.5GiB to bytes. Raises ConfigError for anything else."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?(GB|GiB)", text)
    if match is None or float(match[1]) <= 0:
        raise ConfigError(f"--gpu-memory {text}: not an amount of memory; write it as 80GB or 75GiB")
    return int(float(match[1]) * _UNITS[match[2]])


def _as_json(
    arguments: argparse.Namespace, workload: Workload, hardware: Hardware, memory: int, plan: Plan
) -> dict[str, Any]:
    return {
        **_inputs_json(arguments, workload, hardware, memory),
        "length": workload.length,
        "num_layouts": plan.num_layouts,
        "best": [_layout_json(estimate) for estimate in plan.best],
        "refused": [refusal._asdict() for refusal in plan.refusals],
    }


def _longest_json(
    arguments: argparse.Namespace, workload: Workload, hardware: Hardware, memory: int, plan: LongestPlan
) -> dict[str, Any]:
    return {
        **_inputs_json(arguments, workload, hardware, memory),
        "num_meshes": plan.num_meshes,
        "longest": [{"length": found.length, **_layout_json(found.estimate)} for found in plan.best],
        "refused": [refusal._asdict() for refusal in plan.refusals],
    }


def _inputs_json(arguments: argparse.Namespace, workload: Workload, hardware: Hardware, memory: int) -> dict[str, Any]:
    return {
        "model": arguments.model,
        "gpus": arguments.gpus,
        "gpu": hardware.name,
        "memory_bytes": memory,
        "global_batch_size": workload.global_batch_size,
        "compiled": workload.compiled,
    }


def _layout_json(estimate: Estimate) -> dict[str, Any]:
    layout, parallel = estimate.layout, estimate.layout.parallel
    return {
        "name": layout.name(),
        "overrides": layout.overrides(),
        "tp": parallel.tp,
        "cp": parallel.cp,
        "pp": parallel.pp,
        "dp": layout.dp,
        "zero": layout.zero,
        "sequence_parallel": parallel.sequence_parallel,
        "micro_batch_size": layout.micro_batch_size,
        "num_micro_batches": layout.num_micro_batches,
        "recompute": layout.recompute,
        "memory_bytes": {"total": estimate.memory.total, **estimate.memory._asdict()},
        "step_seconds": {"total": estimate.time.total, **estimate.time._asdict()},
        "sent_bytes": estimate.sent._asdict(),
        "tokens_per_second": estimate.tokens_per_second,
    }


def _print(arguments: argparse.Namespace, workload: Workload, hardware: Hardware, memory: int, plan: Plan) -> None:
    _print_inputs(arguments, workload, hardware, memory, f" of {workload.length} tokens")
    head = f"{plan.num_layouts} layouts were tried; the fastest of each mesh that fits, within 2 % the simplest:\n"
    print(head if plan.best else "")
    for number, estimate in enumerate(plan.best, 1):
        _print_estimate(number, estimate)
    if not plan.best:
        print("No layout fits. Use more GPUs or memory, or another global batch size. Reasons:\n")
    _print_refusals(plan.refusals)
    if plan.best:
        _print_command(arguments, plan.best[0].layout.overrides())


def _print_longest(
    arguments: argparse.Namespace, workload: Workload, hardware: Hardware, memory: int, plan: LongestPlan
) -> None:
    _print_inputs(arguments, workload, hardware, memory, "")
    print(f"meshes tried: {plan.num_meshes}; the longest samples that fit, one a micro-batch:\n" if plan.best else "")
    for number, found in enumerate(plan.best, 1):
        _print_estimate(number, found.estimate, length=found.length)
    if not plan.best:
        print("No length fits. Use more GPUs or memory, or another global batch size. Reasons:\n")
    _print_refusals(plan.refusals)
    if plan.best:
        _print_command(arguments, _overrides(plan.best[0].estimate, plan.best[0].length))


def _print_inputs(
    arguments: argparse.Namespace, workload: Workload, hardware: Hardware, memory: int, length: str
) -> None:
    parameters = LanguageModel(workload.model).num_parameters()
    print(
        f"{arguments.model}: {_count(parameters)} parameters, {workload.global_batch_size} samples{length} a "
        f"step, {'compiled' if workload.compiled else 'eager'} blocks"
    )
    free = usable_bytes(memory)
    print(f"{arguments.gpus} x {hardware.name} with {memory / 2**30:.1f} GiB, {free / 2**30:.1f} of it for tensors")


def _count(number: int) -> str:
    if number < 10**6:
        return f"{number:,}"
    return f"{number / 1e9:.2f} billion" if number >= 10**9 else f"{number / 1e6:.1f} million"


def _overrides(estimate: Estimate, length: int | None) -> list[str]:
    return [*estimate.layout.overrides(), *([] if length is None else [f"data.sequence_length={length}"])]


def _print_estimate(number: int, estimate: Estimate, *, length: int | None = None) -> None:
    """Prints a layout; `length`: that of the samples, if it was searched for."""
    total = estimate.memory.total
    unit, unit_bytes, form = ("GiB", 2**30, ".1f") if total >= 2**30 else ("MiB", 2**20, ".0f")
    searched = "" if length is None else f"{length:,} tokens: "
    print(
        f"{number}. {searched}{estimate.layout.name()}: {total / unit_bytes:{form}} {unit}, "
        f"{estimate.time.total:.3g} s a step, {estimate.tokens_per_second:,.0f} tokens/s"
    )
    print(f"   {unit}: {_named(estimate.memory._asdict(), unit_bytes, form)}")
    print(f"   seconds: {_named(estimate.time._asdict(), 1, '.3f')}")
    print(f"   GB sent by a GPU: {_named(estimate.sent._asdict(), 1e9, '.2f') or 'nothing'}")
    print(f"   {' '.join(_overrides(estimate, length))}\n")


def _print_command(arguments: argparse.Namespace, overrides: list[str]) -> None:
    """Prints how to train on the first layout."""
    name = arguments.model if arguments.model.endswith(".toml") else f"RUN.toml model.preset={arguments.model}"
    train = shlex.join(["train", *name.split(), *arguments.overrides, *overrides])
    if arguments.gpus == 1:
        print(f"\nTo train on the first: megalin {train}")
    elif arguments.gpus <= GPUS_PER_HOST:
        print(f"\nTo train on the first: torchrun --nproc-per-node {arguments.gpus} -m megalin {train}")
    else:
        print(f"\nTo train on the first, on each host by a launcher (docs/launching): megalin {train}")


def _named(values: dict[str, float], unit: float, form: str) -> str:
    """Names and values in `unit`; those that round to zero are left out."""
    shown = {name.replace("_", " "): format(value / unit, form) for name, value in values.items()}
    return ", ".join(f"{name} {text}" for name, text in shown.items() if float(text))


def _print_refusals(refusals: list[InfeasibleLayout]) -> None:
    by_kind: dict[str, list[InfeasibleLayout]] = defaultdict(list)
    for refusal in refusals:
        by_kind[refusal.kind].append(refusal)
    if by_kind:
        print("rejected layouts:")
    for kind, group in sorted(by_kind.items(), key=lambda item: -len(item[1])):
        nearest = min(group, key=lambda refusal: refusal.missing_bytes)
        example = "" if nearest.reason == kind else f"; for example {nearest.layout}: {nearest.reason}"
        print(f"{len(group):6}  {kind}{example}")
