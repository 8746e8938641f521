"""Training speed of a config on random tokens: tokens/s, TFLOP/s, memory. Prints one JSON line at the end, and of what
was measured so far before a baseline, whose compilation takes minutes, and after each of its variants.

Takes a preset or a config file, and overrides of the run config. A preset has dtype bfloat16, micro-batches of 4
sequences of 8192 tokens, and one of them a step on each data-parallel rank. A run's config file is timed with its own
mesh, batch, engine, optimizer and its peak learning rate.

python tools/benchmark_train.py transnormerllm-1b-64k train.compile=true
python tools/benchmark_train.py run.toml train.recompute=true parallel.zero=2
python tools/benchmark_train.py transnormerllm-1b train.compile=true train.matmul_dtype=float8
python tools/benchmark_train.py hgrn2-1b model.vocab_size=50304 train.compile=true --roofline --baseline fla
python tools/benchmark_train.py danet-base train.micro_batch_size=64 data.sequence_length=512
torchrun --nproc-per-node 2 tools/benchmark_train.py hgrn2-1b parallel.tp=2 train.cuda_graphs=true --profile
torchrun --nproc-per-node 4 tools/benchmark_train.py transnormerllm-1b-64k parallel.cp=4 data.sequence_length=65536
torchrun --nproc-per-node 4 tools/benchmark_train.py transnormerllm-1b-64k parallel.pp=4 train.global_batch_size=64
torchrun --nproc-per-node 4 tools/benchmark_train.py transnormerllm-1b-64k train.engine=deepspeed parallel.zero=2

--profile runs one more step and prints the time of its kernels on the first rank's device; with several ranks it runs
three, and the JSON line has the communication of the second and its exposed part (train_benchmarks/communication.py).
--device-time runs four more steps, and the JSON line has the fraction of a step in which the device is idle.
--roofline compares the step with two lower bounds (train_benchmarks/roofline.py): the time of its matmuls, scans and
memory traffic, and the same with scans and attention at their own roofline. It reads the ops of an eager step; where
the steps were replays of a CUDA graph, eager ones run after them.
--baseline also times another library's model of the same sizes, in its fastest form (train_benchmarks/baselines.py).
--simulated-ranks N runs one rank of N on one GPU, with simulated collectives (train_benchmarks/simulated_ranks.py).
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from train_benchmarks.baselines import BASELINES, VARIANTS, baseline_step, build_baseline, is_own_model
from train_benchmarks.batches import random_batches
from train_benchmarks.clock import StartedStep, Timing, end_on, time_steps
from train_benchmarks.communication import Communication, record_communication
from train_benchmarks.device_time import DeviceTime, record_device_time
from train_benchmarks.engine import KEYS, build_engine, run_config
from train_benchmarks.fla_scan import scans_by_fla
from train_benchmarks.roofline import Recorded, Roofline, masked_flops, measure_roofline, record, unavoidable_bytes
from train_benchmarks.simulated_ranks import simulated_ranks, with_own_vocabulary

from megalin.data.batch import AnyBatch
from megalin.errors import ConfigError
from megalin.launch import launched
from megalin.model.config import EncoderConfig, ModelConfig
from megalin.ops.dispatch import backend
from megalin.parallel.mesh import Mesh
from megalin.parallel.process_group import compute_device, process_group
from megalin.terminal_output import exit_code
from megalin.train.compute_dtypes import COMPUTE_DTYPES
from megalin.train.config import RunConfig
from megalin.train.engine import FullyShardedEngine
from megalin.train.hardware import peak_memory_bytes

FAILURES = (RuntimeError, ImportError, TypeError, ValueError, AttributeError, AssertionError, KeyError)
"""Errors of a library's compilation or launch; its other variants are still timed."""


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", help="a preset or a config file")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help=f"overrides of {', '.join(KEYS)}")
    parser.add_argument("--document-length", type=int, help="tokens per packed document (the sequence length)")
    parser.add_argument("--warmup", type=int, default=5, help="untimed steps at the start (5)")
    parser.add_argument("--steps", type=int, default=20, help="timed steps; the median is reported (20)")
    parser.add_argument(
        "--simulated-ranks", type=int, default=1, metavar="N", help="run as rank 0 of N with simulated collectives (1)"
    )
    parser.add_argument("--profile", action="store_true", help="profile one more step and print its kernels")
    parser.add_argument("--device-time", action="store_true", help="profile four more steps for the device's idle time")
    parser.add_argument("--roofline", action="store_true", help="measure the step's roofline; one GPU only")
    parser.add_argument("--baseline", choices=sorted(BASELINES), help="also time this library's model; one GPU only")
    arguments = parser.parse_intermixed_args()
    if arguments.warmup < 1:
        parser.error(f"--warmup {arguments.warmup}: the first step compiles and is never timed; use 1 or more")
    for name, value in (("steps", arguments.steps), ("document-length", arguments.document_length)):
        if value is not None and value < 1:
            parser.error(f"--{name} {value}: use at least 1")
    if arguments.simulated_ranks < 1:
        parser.error(f"--simulated-ranks {arguments.simulated_ranks}: use at least 2 ranks, this one included")
    return arguments


def check_simulation(ranks: int, run: RunConfig) -> None:
    """Raises ConfigError for a run that a single simulated rank does not support."""
    started, problem = launched().world_size, ""
    if started > 1:
        problem = f"needs a single process, but the launcher started {started}; start one"
    elif run.parallel.pp > 1:
        problem = "pipeline stages wait for each other's activations; leave out parallel.pp"
    elif run.train.engine != "fsdp2":
        problem = f"the engine {run.train.engine} creates its own process groups; leave out train.engine"
    elif run.parallel.may_use_async_tp:
        problem = "async tensor parallelism copies to the other ranks' GPUs; add parallel.tp_overlap=none"
    if problem:
        raise ConfigError(f"--simulated-ranks {ranks}: {problem}")


class Ours(NamedTuple):
    """Results of timing our model, which has been freed."""

    timing: Timing
    flops_per_token: int
    visible_flops: int
    """For the roofline: the same without pairs of tokens behind softmax attention's masks."""
    peak_memory_gib: float
    recorded: Recorded | None
    moved_bytes: int
    sent: Communication | None
    """Of a profiled step, with several ranks."""
    replays: bool
    """Whether the last steps were replays of a CUDA graph."""
    launch_seconds: float
    """Median time of the host to launch a step."""
    device: DeviceTime | None


def check_options(arguments: argparse.Namespace, run: RunConfig, mesh: Mesh) -> None:
    """Raises ConfigError for --roofline or --baseline with DeepSpeed, several ranks or no GPU; for --baseline or
    --document-length with an encoder, and --device-time without a GPU."""
    if arguments.device_time and mesh.device.type != "cuda":
        raise ConfigError("--device-time measures a GPU; leave it out on a CPU")
    if arguments.document_length is not None and isinstance(run.model, EncoderConfig):
        raise ConfigError(
            f"--document-length {arguments.document_length}: {arguments.config} is an encoder, whose samples are not "
            "packed; leave it out"
        )
    if not (arguments.roofline or arguments.baseline):
        return
    if run.train.engine != "fsdp2":
        raise ConfigError("--roofline and --baseline support train.engine=fsdp2 only; leave out the engine, or them")
    if dist.get_world_size() > 1 or mesh.device.type != "cuda":
        raise ConfigError("--roofline and --baseline need exactly one GPU; start one process on a machine with a GPU")
    if arguments.baseline and isinstance(run.model, EncoderConfig):
        raise ConfigError(
            f"--baseline {arguments.baseline}: {arguments.config} is an encoder, and no baseline has one; leave it out"
        )


def measure(arguments: argparse.Namespace, run: RunConfig, mesh: Mesh) -> dict[str, object]:
    """Runs the benchmark; returns the fields of the JSON line.

    Raises:
        ConfigError: options that `check_options` rejects, a missing baseline, a config that DeepSpeed does not support.
    """
    check_options(arguments, run, mesh)
    ours = eager = measure_ours(arguments, run, mesh)
    release_memory()
    if arguments.roofline and ours.replays:
        eager = measure_ours(arguments, eagerly(run), mesh)
        release_memory()
    ranks, timing, train, length = dist.get_world_size(), ours.timing, run.train, run.data.sequence_length
    tokens = train.global_batch_size * length
    rate = tokens / timing.median_seconds
    peaks = [0.0] * ranks
    dist.all_gather_object(peaks, ours.peak_memory_gib)
    result: dict[str, object] = {
        "model": arguments.config,
        "overrides": arguments.overrides,
        "batch": train.micro_batch_size,
        "micro_batches": train.global_batch_size // (train.micro_batch_size * mesh.samples.size),
        "length": length,
        "document_length": arguments.document_length or length,
        **train.model_dump(include={"dtype", "compile", "recompute", "engine", "deepspeed_config"}),
        "cuda_graphs": ours.replays,
        "parallel": mesh.config.model_dump(exclude_defaults=True),
        "ranks": ranks,
        "simulated": arguments.simulated_ranks > 1,
        "tokens_per_second": rate,
        "tokens_per_second_per_rank": rate / ranks,
        "step_seconds_median": timing.median_seconds,
        "step_seconds_min_max": [min(timing.seconds), max(timing.seconds)],
        "launch_seconds_median": ours.launch_seconds,
        "model_tflops_per_second_per_rank": ours.flops_per_token * rate / ranks / 1e12,
        "peak_memory_gib": max(peaks),
        "peak_memory_gib_by_rank": peaks,
        "build_to_first_step_seconds": timing.first_step_seconds,
        "losses": timing.losses,
        "kernels": {op: choice.backend for op, choice in backend.used().items()},
        "device": torch.cuda.get_device_name() if mesh.device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "commit": commit(),
    }
    if ours.sent is not None:
        result["communication_milliseconds"] = ours.sent._asdict()
    if ours.device is not None:
        result |= ours.device.describe(timing.median_seconds)
    if eager.recorded is not None:
        roofline = measure_roofline(eager.recorded, eager.moved_bytes, step_flops=ours.visible_flops * tokens)
        step = min(timing.median_seconds, eager.timing.median_seconds)
        result |= {"eager_step_seconds_median": eager.timing.median_seconds, **describe_roofline(roofline, step)}
        release_memory()
    if arguments.baseline:
        print(json.dumps(result), flush=True)
        for baseline in measure_baseline(arguments, run, mesh):
            result |= {"baseline": baseline, "times_baseline": rate / float(baseline["tokens_per_second"])}
            print(json.dumps(result), flush=True)
    return result


def fresh_batches(arguments: argparse.Namespace, run: RunConfig, mesh: Mesh) -> list[list[AnyBatch]]:
    """This rank's micro-batches of every step, each of other tokens, made before the first one."""
    length = arguments.document_length
    count = arguments.warmup + arguments.steps
    run = with_own_vocabulary(run) if arguments.simulated_ranks > 1 else run
    return [random_batches(run, mesh, step=step, document_length=length) for step in range(count)]


def measure_ours(arguments: argparse.Namespace, run: RunConfig, mesh: Mesh) -> Ours:
    """Times our step, and profiles one more if --profile or --roofline asks for it."""
    started = time.perf_counter()
    batches = fresh_batches(arguments, run, mesh)
    engine = build_engine(run, mesh)

    launches: list[float] = []

    def start(number: int) -> StartedStep:
        called = time.perf_counter()
        started = engine.step(batches[number % len(batches)], learning_rate=run.optimizer.lr, step=number)
        launches.append(time.perf_counter() - called)
        return StartedStep(started.is_ready, lambda: started.wait().loss, end_on(mesh.device))

    timing = time_steps(start, warmup=arguments.warmup, steps=arguments.steps, started=started)
    launch_seconds = statistics.median(launches[arguments.warmup :])
    peak, recorded, moved, sent = peak_memory_bytes(mesh.device) / 2**30, None, 0, None
    for line in engine.report_lines() if mesh.is_first_rank else []:
        print(line, file=sys.stderr)
    device = record_device_time(start, arguments.warmup + arguments.steps) if arguments.device_time else None
    replays = isinstance(engine, FullyShardedEngine) and engine.replays
    if arguments.profile or (arguments.roofline and not replays):
        number = arguments.warmup + arguments.steps
        if dist.get_world_size() > 1:
            sent, profile = record_communication(start, number)
        else:
            recorded, profile = record(lambda: start(number).wait())
        if arguments.profile and mesh.is_first_rank:
            print(profile.key_averages().table(sort_by="self_device_time_total", row_limit=40), file=sys.stderr)
    flops = visible = engine.model.training_flops(run.data.sequence_length)
    if arguments.roofline:
        visible -= masked_flops(engine.model, run.data.sequence_length)
        compute = COMPUTE_DTYPES[run.train.dtype].itemsize
        wide = isinstance(run.model, ModelConfig) and run.model.residual_dtype == "float32"
        tokens = run.train.micro_batch_size * run.data.sequence_length
        moved = unavoidable_bytes(
            engine.model, tokens=tokens, compute_bytes=compute, hidden_bytes=max(compute, 4) if wide else compute
        )
    engine.close()
    if not arguments.roofline or replays:
        recorded = None
    return Ours(timing, flops, visible, peak, recorded, moved, sent, replays, launch_seconds, device)


def eagerly(run: RunConfig) -> RunConfig:
    """The run without CUDA graphs."""
    return run.model_copy(update={"train": run.train.model_copy(update={"cuda_graphs": False})})


def describe_roofline(roofline: Roofline, step_seconds: float) -> dict[str, Any]:
    """Fields of the JSON line for the roofline; times in milliseconds a step."""
    return {
        "roofline_fraction": roofline.seconds / step_seconds,
        "roofline_milliseconds": roofline.seconds * 1e3,
        "lower_bound_fraction": roofline.lower_bound / step_seconds,
        "lower_bound_milliseconds": roofline.lower_bound * 1e3,
        "roofline_parts_milliseconds": {
            "matmuls": roofline.matmuls * 1e3,
            "matmuls_isolated": roofline.matmuls_isolated * 1e3,
            "matmuls_in_step": roofline.matmuls_in_step * 1e3,
            "mixing": roofline.mixing * 1e3,
            "mixing_at_its_roofline": roofline.mixing_roofline * 1e3,
            "bytes": roofline.bytes * 1e3,
        },
        "roofline_mixing_milliseconds": {name: seconds * 1e3 for name, seconds in roofline.mixing_seconds.items()},
        "roofline_matmuls": roofline.matmul_rows,
        "roofline_moved_bytes": roofline.moved_bytes,
        "copy_bytes_per_second": roofline.copy_bandwidth,
    }


def measure_baseline(arguments: argparse.Namespace, run: RunConfig, mesh: Mesh) -> Iterator[dict[str, Any]]:
    """Times the baseline's step with the same clock, on the same tokens: after each of the library's variants the
    fastest so far.

    Raises:
        ConfigError: as `build_baseline`, or no variant runs.
    """
    assert isinstance(run.model, ModelConfig), type(run.model)
    if is_own_model(arguments.baseline, run.model):
        torch.cuda.reset_peak_memory_stats()
        with scans_by_fla():
            timing = measure_ours(argparse.Namespace(**{**vars(arguments), "roofline": False}), run, mesh).timing
        own = describe_baseline(run, "our model on its scan", run.train.global_batch_size, timing, mesh)
        yield {"library": arguments.baseline, **own}
        return
    found: list[dict[str, Any]] = []
    failed: dict[str, str] = {}
    for variant in VARIANTS[arguments.baseline]:
        try:
            found.append({"variant": variant, **measure_variant(arguments, run, mesh, variant)})
            print(f"baseline, {variant}: {found[-1]['step_seconds_median'] * 1e3:.1f} ms", file=sys.stderr)
        except ConfigError:
            raise
        except FAILURES as error:
            failed[variant] = f"{type(error).__name__}: {error}"[:500]
        release_memory()
        if found:
            found.sort(key=lambda row: row["step_seconds_median"])
            others = {row["variant"]: row["step_seconds_median"] for row in found[1:]}
            yield {"library": arguments.baseline, **found[0], "slower_variants": others, "failed_variants": failed}
    if not found:
        raise ConfigError(f"--baseline {arguments.baseline}: no variant runs: {failed}; leave --baseline out")


def measure_variant(arguments: argparse.Namespace, run: RunConfig, mesh: Mesh, variant: str) -> dict[str, Any]:
    """Times one variant of the baseline's model."""
    assert isinstance(run.model, ModelConfig), type(run.model)
    torch.cuda.reset_peak_memory_stats()
    started = time.perf_counter()
    model = build_baseline(arguments.baseline, run.model, device=mesh.device, variant=variant)
    tokens = [batches[0].tokens for batches in fresh_batches(arguments, run, mesh)]
    start = baseline_step(model, tokens, lr=run.optimizer.lr, graph=VARIANTS[arguments.baseline][variant].graph)
    timing = time_steps(start, warmup=arguments.warmup, steps=arguments.steps, started=started)
    return describe_baseline(run, type(model).__name__, run.train.micro_batch_size, timing, mesh)


def describe_baseline(run: RunConfig, name: str, samples: int, timing: Timing, mesh: Mesh) -> dict[str, Any]:
    """Fields of the JSON line for a step of `samples` sequences of a baseline."""
    return {
        "class": name,
        "tokens_per_second": samples * run.data.sequence_length / timing.median_seconds,
        "step_seconds_median": timing.median_seconds,
        "step_seconds_min_max": [min(timing.seconds), max(timing.seconds)],
        "peak_memory_gib": peak_memory_bytes(mesh.device) / 2**30,
        "build_to_first_step_seconds": timing.first_step_seconds,
        "losses": timing.losses,
    }


def release_memory() -> None:
    """Returns the freed model's memory to the device."""
    torch._dynamo.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def commit() -> str:
    """Commit of this checkout; empty outside of a git repository."""
    result = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return result.stdout.strip()


def main() -> int:
    arguments = parse_arguments()
    return exit_code(lambda: benchmark(arguments))


def benchmark(arguments: argparse.Namespace) -> None:
    """Prints the JSON line of a run on the launcher's ranks, or on one simulated rank."""
    device, ranks = compute_device(), arguments.simulated_ranks
    run = run_config(arguments.config, arguments.overrides, launched().world_size if ranks == 1 else ranks)
    if ranks > 1:
        check_simulation(ranks, run)
    with process_group(device) if ranks == 1 else simulated_ranks(ranks, device):
        mesh = Mesh(run.parallel, device)
        result = measure(arguments, run, mesh)
        if mesh.is_first_rank:
            print(json.dumps(result), flush=True)


if __name__ == "__main__":
    sys.exit(main())
