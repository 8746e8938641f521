"""Training speed of a preset on random tokens: tokens/s, TFLOP/s, memory. Prints one JSON line at the end.

python tools/benchmark_train.py transnormerllm-1b-64k --batch 4 --length 8192 --compile
python tools/benchmark_train.py hgrn2-1b model.vocab_size=50304 --compile --roofline --baseline fla
python tools/benchmark_train.py danet-base --batch 64 --length 512
torchrun --nproc-per-node 2 tools/benchmark_train.py transnormerllm-1b-64k --tp 2 --profile ...
torchrun --nproc-per-node 4 tools/benchmark_train.py transnormerllm-1b-64k --cp 4 --batch 1 --length 131072 --recompute
torchrun --nproc-per-node 4 tools/benchmark_train.py transnormerllm-7b-64k --tp 4 --batch 2 --length 2048 --cuda-graphs
torchrun --nproc-per-node 4 tools/benchmark_train.py transnormerllm-1b-64k --pp 4 --micro-batches 16 --batch 1
torchrun --nproc-per-node 4 tools/benchmark_train.py transnormerllm-1b-64k --engine deepspeed --zero 2

--profile runs one more step and prints the time of its kernels on the first rank's device; with several ranks it runs
three, and the JSON line has the communication of the second and its exposed part (train_benchmarks/communication.py).
--roofline compares the step with the time of its matmuls, scans and memory traffic (train_benchmarks/roofline.py).
--baseline also times another library's model of the same sizes (train_benchmarks/baselines.py).
--simulated-ranks N runs one rank of N on one GPU, with simulated collectives (train_benchmarks/simulated_ranks.py).
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import time
from typing import Any, NamedTuple, get_args

import torch
import torch.distributed as dist
from train_benchmarks.baselines import BASELINES, baseline_step, build_baseline, is_own_model
from train_benchmarks.batches import random_batches
from train_benchmarks.clock import StartedStep, Timing, end_on, time_steps
from train_benchmarks.communication import Communication, record_communication
from train_benchmarks.engine import OPTIMIZER, build_engine
from train_benchmarks.fla_scan import scans_by_fla
from train_benchmarks.roofline import Recorded, Roofline, measure_roofline, record, unavoidable_bytes
from train_benchmarks.simulated_ranks import simulated_ranks

from megalin.commands.base import model_from
from megalin.config import parse
from megalin.errors import ConfigError, MegalinError
from megalin.launch import launched
from megalin.model.config import AnyModelConfig, EncoderConfig, ModelConfig
from megalin.ops.dispatch import backend
from megalin.parallel.async_tensor_parallel import TPOverlapName
from megalin.parallel.context_parallel import ExchangeName
from megalin.parallel.mesh import Mesh, ParallelConfig
from megalin.parallel.pipeline_parallel import PPTransferName, ScheduleName
from megalin.parallel.process_group import compute_device, process_group
from megalin.train.build import COMPUTE_DTYPES
from megalin.train.hardware import peak_memory_bytes


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a preset or a config file")
    parser.add_argument("overrides", nargs="*", metavar="model.key=value")
    parser.add_argument("--batch", type=int, default=4, help="sequences per micro-batch (4)")
    parser.add_argument("--micro-batches", type=int, default=1, help="micro-batches per step (1)")
    parser.add_argument("--length", type=int, default=8192, help="tokens per sequence over all ranks (8192)")
    parser.add_argument("--document-length", type=int, help="tokens per packed document (the sequence length)")
    parser.add_argument("--dtype", choices=sorted(COMPUTE_DTYPES), default="bfloat16")
    parser.add_argument(
        "--engine", choices=["fsdp2", "deepspeed"], default="fsdp2", help="engine that shards the weights (fsdp2)"
    )
    parser.add_argument("--deepspeed-config", help="JSON config of the deepspeed engine")
    parser.add_argument("--compile", action="store_true", help="compile the blocks")
    parser.add_argument("--cuda-graphs", action="store_true", help="run each step as one CUDA graph (4 warmup steps)")
    parser.add_argument("--recompute", action="store_true", help="recompute activations in the backward")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--sequence-parallel", action="store_true")
    parser.add_argument("--tp-overlap", choices=get_args(TPOverlapName), default="auto")
    parser.add_argument("--cp", type=int, default=1)
    parser.add_argument("--cp-exchange", choices=get_args(ExchangeName), default="auto")
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument("--pp-schedule", choices=get_args(ScheduleName), default="1f1b")
    parser.add_argument("--pp-stages-per-rank", type=int, default=1, help="stages per rank (1)")
    parser.add_argument("--pp-transfer", choices=get_args(PPTransferName), default="auto")
    parser.add_argument("--shard", type=int, help="ranks of the data axis that the weights are sharded over (all)")
    parser.add_argument("--zero", type=int, choices=range(4), help="ZeRO stage (3; with --pp 1)")
    parser.add_argument(
        "--simulated-ranks", type=int, default=1, metavar="N", help="run as rank 0 of N with simulated collectives (1)"
    )
    parser.add_argument("--warmup", type=int, default=5, help="untimed steps at the start (5)")
    parser.add_argument("--steps", type=int, default=20, help="timed steps; the median is reported (20)")
    parser.add_argument("--profile", action="store_true", help="profile one more step and print its kernels")
    parser.add_argument("--roofline", action="store_true", help="measure the step's roofline; one GPU only")
    parser.add_argument("--baseline", choices=sorted(BASELINES), help="also time this library's model; one GPU only")
    arguments = parser.parse_args()
    if arguments.warmup < 1:
        parser.error(f"--warmup {arguments.warmup}: the first step compiles and is never timed; use 1 or more")
    if arguments.simulated_ranks != 1 and (problem := simulation_problem(arguments)):
        parser.error(f"--simulated-ranks {arguments.simulated_ranks}: {problem}")
    return arguments


def simulation_problem(arguments: argparse.Namespace) -> str:
    """Names the argument that a single simulated rank does not support; empty if there is none."""
    if arguments.simulated_ranks < 1:
        return "the number of ranks must be at least 2, this one included"
    if launched().world_size > 1:
        return f"needs a single process, but the launcher started {launched().world_size}; start one"
    if arguments.pp > 1:
        return f"pipeline stages wait for each other's activations; leave out --pp {arguments.pp}"
    if arguments.engine != "fsdp2":
        return f"--engine {arguments.engine} creates its own process groups; leave it out"
    if arguments.sequence_parallel and arguments.tp_overlap != "none":
        return "async tensor parallelism copies to the other ranks' GPUs; add --tp-overlap none"
    return ""


def parallel_config(arguments: argparse.Namespace) -> ParallelConfig:
    """Builds the mesh config from the arguments. Raises ConfigError if they contradict each other."""
    chosen = {name: value for name, value in vars(arguments).items() if name in ParallelConfig.model_fields}
    return parse(ParallelConfig, chosen, "command line")


class Ours(NamedTuple):
    """Results of timing our model, which has been freed."""

    timing: Timing
    flops_per_token: int
    peak_memory_gib: float
    recorded: Recorded | None
    moved_bytes: int
    sent: Communication | None
    """Of a profiled step, with several ranks."""


def check_options(arguments: argparse.Namespace, mesh: Mesh) -> None:
    """Raises ConfigError for --roofline or --baseline with DeepSpeed, several ranks or no GPU, and for
    --deepspeed-config with another engine."""
    if arguments.deepspeed_config and arguments.engine == "fsdp2":
        raise ConfigError("--deepspeed-config has no effect on --engine fsdp2; leave it out, or use --engine deepspeed")
    if (arguments.roofline or arguments.baseline) and arguments.engine != "fsdp2":
        raise ConfigError(
            f"--roofline and --baseline support --engine fsdp2 only; leave out --engine {arguments.engine}, or them"
        )
    if (arguments.roofline or arguments.baseline) and (dist.get_world_size() > 1 or mesh.device.type != "cuda"):
        raise ConfigError("--roofline and --baseline need exactly one GPU; start one process on a machine with a GPU")


def measure(arguments: argparse.Namespace, mesh: Mesh) -> dict[str, object]:
    """Runs the benchmark; returns the fields of the JSON line.

    Raises:
        ConfigError: options that `check_options` rejects, a missing baseline or one for an encoder, a config that
            DeepSpeed does not support.
    """
    check_options(arguments, mesh)
    config = model_from(arguments.model, arguments.overrides)
    if arguments.baseline and isinstance(config, EncoderConfig):
        raise ConfigError(
            f"--baseline {arguments.baseline}: {arguments.model} is an encoder, and no baseline has one; leave it out"
        )
    ours = measure_ours(arguments, config, mesh)
    release_memory()
    ranks, timing = dist.get_world_size(), ours.timing
    tokens = arguments.batch * arguments.micro_batches * arguments.length * mesh.samples.size
    rate = tokens / timing.median_seconds
    peaks = [0.0] * ranks
    dist.all_gather_object(peaks, ours.peak_memory_gib)
    result: dict[str, object] = {
        "model": arguments.model,
        "overrides": arguments.overrides,
        "batch": arguments.batch,
        "micro_batches": arguments.micro_batches,
        "length": arguments.length,
        "document_length": arguments.document_length or arguments.length,
        "dtype": arguments.dtype,
        "compile": arguments.compile,
        "recompute": arguments.recompute,
        "cuda_graphs": arguments.cuda_graphs,
        "engine": arguments.engine,
        "deepspeed_config": arguments.deepspeed_config,
        "parallel": mesh.config.model_dump(exclude_defaults=True),
        "ranks": ranks,
        "simulated": arguments.simulated_ranks > 1,
        "tokens_per_second": rate,
        "tokens_per_second_per_rank": rate / ranks,
        "step_seconds_median": timing.median_seconds,
        "step_seconds_min_max": [min(timing.seconds), max(timing.seconds)],
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
    if ours.recorded is not None:
        result |= describe_roofline(measure_roofline(ours.recorded, ours.moved_bytes), timing.median_seconds)
        release_memory()
    if arguments.baseline:
        baseline = measure_baseline(arguments, config, mesh)
        result |= {"baseline": baseline, "times_baseline": rate / float(baseline["tokens_per_second"])}
    return result


def measure_ours(arguments: argparse.Namespace, config: AnyModelConfig, mesh: Mesh) -> Ours:
    """Times our step, and profiles one more if --profile or --roofline asks for it."""
    started = time.perf_counter()
    batches, engine = random_batches(arguments, config, mesh), build_engine(arguments, config, mesh)

    def start(number: int) -> StartedStep:
        started = engine.step(batches, learning_rate=OPTIMIZER.lr, step=number)
        return StartedStep(started.is_ready, lambda: started.wait().loss, end_on(mesh.device))

    timing = time_steps(start, warmup=arguments.warmup, steps=arguments.steps, started=started)
    peak, recorded, moved, sent = peak_memory_bytes(mesh.device) / 2**30, None, 0, None
    if arguments.profile or arguments.roofline:
        number = arguments.warmup + arguments.steps
        if dist.get_world_size() > 1:
            sent, profile = record_communication(start, number)
        else:
            recorded, profile = record(lambda: start(number).wait())
        if arguments.profile and mesh.is_first_rank:
            print(profile.key_averages().table(sort_by="self_device_time_total", row_limit=20), file=sys.stderr)
    if arguments.roofline:
        compute = COMPUTE_DTYPES[arguments.dtype].itemsize
        wide = isinstance(config, ModelConfig) and config.residual_dtype == "float32"
        tokens = arguments.batch * arguments.length
        moved = unavoidable_bytes(
            engine.model, tokens=tokens, compute_bytes=compute, hidden_bytes=max(compute, 4) if wide else compute
        )
    flops = engine.model.training_flops(arguments.length)
    engine.close()
    return Ours(timing, flops, peak, recorded if arguments.roofline else None, moved, sent)


def describe_roofline(roofline: Roofline, step_seconds: float) -> dict[str, Any]:
    """Fields of the JSON line for the roofline; times in milliseconds a step."""
    return {
        "roofline_fraction": roofline.seconds / step_seconds,
        "roofline_milliseconds": roofline.seconds * 1e3,
        "roofline_parts_milliseconds": {
            "matmuls": roofline.matmuls * 1e3,
            "matmuls_isolated": roofline.matmuls_isolated * 1e3,
            "matmuls_in_step": roofline.matmuls_in_step * 1e3,
            "mixing": roofline.mixing * 1e3,
            "bytes": roofline.bytes * 1e3,
        },
        "roofline_mixing_milliseconds": {name: seconds * 1e3 for name, seconds in roofline.mixing_seconds.items()},
        "roofline_matmuls": roofline.matmul_rows,
        "roofline_moved_bytes": roofline.moved_bytes,
        "copy_bytes_per_second": roofline.copy_bandwidth,
    }


def measure_baseline(arguments: argparse.Namespace, config: AnyModelConfig, mesh: Mesh) -> dict[str, Any]:
    """Times the baseline's step with the same clock, on the same tokens."""
    assert isinstance(config, ModelConfig), type(config)
    torch.cuda.reset_peak_memory_stats()
    if is_own_model(arguments.baseline, config):
        with scans_by_fla():
            timing = measure_ours(argparse.Namespace(**{**vars(arguments), "roofline": False}), config, mesh).timing
        name = "our model on its scan"
    else:
        started = time.perf_counter()
        model = build_baseline(arguments.baseline, config, device=mesh.device)
        name = type(model).__name__
        start = baseline_step(model, random_batches(arguments, config, mesh)[0].tokens, lr=1e-4)
        timing = time_steps(start, warmup=arguments.warmup, steps=arguments.steps, started=started)
    return {
        "library": arguments.baseline,
        "class": name,
        "tokens_per_second": arguments.batch * arguments.length / timing.median_seconds,
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
    device = compute_device()
    try:
        ranks = arguments.simulated_ranks
        with process_group(device) if ranks == 1 else simulated_ranks(ranks, device):
            mesh = Mesh(parallel_config(arguments), device)
            result = measure(arguments, mesh)
            if mesh.is_first_rank:
                print(json.dumps(result), flush=True)
    except MegalinError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
