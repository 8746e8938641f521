"""Training speed of a preset on random tokens: tokens/s, matrix rate reached, memory. One JSON line at the end.

python tools/benchmark_train.py transnormerllm-1b-64k --batch 4 --length 8192 --compile
python tools/benchmark_train.py hgrn2-1b model.vocab_size=50304 --compile --floor --peer fla
python tools/benchmark_train.py danet-base --batch 64 --length 512
torchrun --nproc-per-node 2 tools/benchmark_train.py transnormerllm-1b-64k --tp 2 --profile ...
torchrun --nproc-per-node 4 tools/benchmark_train.py transnormerllm-1b-64k --cp 4 --batch 1 --length 131072 --recompute
torchrun --nproc-per-node 4 tools/benchmark_train.py transnormerllm-7b-64k --tp 4 --batch 2 --length 2048 --cuda-graphs
torchrun --nproc-per-node 4 tools/benchmark_train.py transnormerllm-1b-64k --pp 4 --micro-batches 16 --batch 1
torchrun --nproc-per-node 4 tools/benchmark_train.py transnormerllm-1b-64k --engine deepspeed --zero 2

--profile prints where one more step spends its time on the first rank's device; of several ranks it is three steps, and
the JSON line says what communication took in the second, and how much of it no other work hid
(train_benchmarks/communication.py).
--floor says which share of the step its products, scan and bytes take by themselves (train_benchmarks/floor.py).
--peer times another library's model of the same sizes after ours was freed (train_benchmarks/peers.py).
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
from train_benchmarks.baselines import PEERS, build_peer, is_own_model, peer_step
from train_benchmarks.batches import random_batches
from train_benchmarks.clock import Begun, Timing, end_on, time_steps
from train_benchmarks.communication import Communication, record_communication
from train_benchmarks.engine import OPTIMIZER, build_engine
from train_benchmarks.fla_scan import scans_by_fla
from train_benchmarks.roofline import Floor, Recorded, measure_floor, record, unavoidable_bytes
from train_benchmarks.simulated_ranks import alone

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
    parser.add_argument("--batch", type=int, default=4, help="sequences of a micro-batch (4)")
    parser.add_argument("--micro-batches", type=int, default=1, help="micro-batches a step (1)")
    parser.add_argument("--length", type=int, default=8192, help="tokens a whole sequence (8192)")
    parser.add_argument("--document-length", type=int, help="tokens a packed document (the whole sequence)")
    parser.add_argument("--dtype", choices=sorted(COMPUTE_DTYPES), default="bfloat16")
    parser.add_argument("--engine", choices=["fsdp2", "deepspeed"], default="fsdp2", help="what shards weights (fsdp2)")
    parser.add_argument("--deepspeed-config", help="a DeepSpeed JSON for that engine")
    parser.add_argument("--compile", action="store_true", help="compile the blocks")
    parser.add_argument(
        "--cuda-graphs", action="store_true", help="start each step as one CUDA graph (4 steps warm up)"
    )
    parser.add_argument("--recompute", action="store_true", help="recompute activations in the backward")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--sequence-parallel", action="store_true")
    parser.add_argument("--tp-overlap", choices=get_args(TPOverlapName), default="auto")
    parser.add_argument("--cp", type=int, default=1)
    parser.add_argument("--cp-exchange", choices=get_args(ExchangeName), default="auto")
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument("--pp-schedule", choices=get_args(ScheduleName), default="1f1b")
    parser.add_argument("--pp-stages-per-rank", type=int, default=1, help="stages a rank (1)")
    parser.add_argument("--pp-transfer", choices=get_args(PPTransferName), default="auto")
    parser.add_argument("--shard", type=int, help="ranks of the data axis that share the weights (all)")
    parser.add_argument("--zero", type=int, choices=range(4), help="ZeRO's stage (3; with --pp 1)")
    parser.add_argument(
        "--alone", type=int, default=1, metavar="N", help="as rank 0 of N that have its tensors: what a rank computes"
    )
    parser.add_argument("--warmup", type=int, default=5, help="steps before the clock starts (5)")
    parser.add_argument("--steps", type=int, default=20, help="timed steps; the median counts (20)")
    parser.add_argument("--profile", action="store_true", help="print where one more step spends its time")
    parser.add_argument("--floor", action="store_true", help="measure the step's floor; on one GPU")
    parser.add_argument("--peer", choices=sorted(PEERS), help="time this library's model as well; on one GPU")
    arguments = parser.parse_args()
    if arguments.warmup < 1:
        parser.error(f"--warmup {arguments.warmup}: the first step compiles and is never timed; use 1 or more")
    if arguments.alone != 1 and (problem := waits_for_others(arguments)):
        parser.error(f"--alone {arguments.alone}: {problem}")
    return arguments


def waits_for_others(arguments: argparse.Namespace) -> str:
    """What of these a rank cannot do by itself; empty where it can."""
    if arguments.alone < 1:
        return "the number of ranks, this one among them; use 2 or more"
    if launched().world_size > 1:
        return f"one process stands for all, and the launcher started {launched().world_size}; start one"
    if arguments.pp > 1:
        return f"stages wait for each other's activations; leave --pp {arguments.pp} out"
    if arguments.engine != "fsdp2":
        return f"--engine {arguments.engine} has process groups of its own; leave it out"
    if arguments.sequence_parallel and arguments.tp_overlap != "none":
        return "copies between GPUs need them; add --tp-overlap none"
    return ""


def parallel_config(arguments: argparse.Namespace) -> ParallelConfig:
    """The mesh that the arguments name. Raises ConfigError where they contradict each other."""
    chosen = {name: value for name, value in vars(arguments).items() if name in ParallelConfig.model_fields}
    return parse(ParallelConfig, chosen, "command line")


class Ours(NamedTuple):
    """What a run of ours leaves behind, its model freed."""

    timing: Timing
    flops_per_token: int
    peak_memory_gib: float
    recorded: Recorded | None
    moved_bytes: int
    sent: Communication | None
    """Of a profiled step of several ranks."""


def check_options(arguments: argparse.Namespace, mesh: Mesh) -> None:
    """Raises ConfigError for a floor or a peer of DeepSpeed's engine, on several ranks or without a GPU, and for a
    DeepSpeed JSON without that engine."""
    if arguments.deepspeed_config and arguments.engine == "fsdp2":
        raise ConfigError("--deepspeed-config is nothing that fsdp2 reads; leave it out, or use --engine deepspeed")
    if (arguments.floor or arguments.peer) and arguments.engine != "fsdp2":
        raise ConfigError(f"--floor and --peer compare steps of fsdp2; leave --engine {arguments.engine} out, or them")
    if (arguments.floor or arguments.peer) and (dist.get_world_size() > 1 or mesh.device.type != "cuda"):
        raise ConfigError("--floor and --peer compare steps of one GPU; start one process on a machine that has one")


def measure(arguments: argparse.Namespace, mesh: Mesh) -> dict[str, object]:
    """Everything that the JSON line says.

    Raises:
        ConfigError: what `check_options` says, a peer that there is not, or of an encoder, what DeepSpeed cannot do.
    """
    check_options(arguments, mesh)
    config = model_from(arguments.model, arguments.overrides)
    if arguments.peer and isinstance(config, EncoderConfig):
        raise ConfigError(
            f"--peer {arguments.peer}: {arguments.model} is an encoder, and no peer here has one; leave it out"
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
        "alone": arguments.alone > 1,
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
        result |= describe_floor(measure_floor(ours.recorded, ours.moved_bytes), timing.median_seconds)
        release_memory()
    if arguments.peer:
        peer = measure_peer(arguments, config, mesh)
        result |= {"peer": peer, "times_peer": rate / float(peer["tokens_per_second"])}
    return result


def measure_ours(arguments: argparse.Namespace, config: AnyModelConfig, mesh: Mesh) -> Ours:
    """Times our step; profiles one more where the arguments want what it tells."""
    started = time.perf_counter()
    batches, engine = random_batches(arguments, config, mesh), build_engine(arguments, config, mesh)

    def start(number: int) -> Begun:
        started = engine.step(batches, learning_rate=OPTIMIZER.lr, step=number)
        return Begun(started.is_ready, lambda: started.wait().loss, end_on(mesh.device))

    timing = time_steps(start, warmup=arguments.warmup, steps=arguments.steps, started=started)
    peak, recorded, moved, sent = peak_memory_bytes(mesh.device) / 2**30, None, 0, None
    if arguments.profile or arguments.floor:
        number = arguments.warmup + arguments.steps
        if dist.get_world_size() > 1:
            sent, profile = record_communication(start, number)
        else:
            recorded, profile = record(lambda: start(number).wait())
        if arguments.profile and mesh.is_first_rank:
            print(profile.key_averages().table(sort_by="self_device_time_total", row_limit=20), file=sys.stderr)
    if arguments.floor:
        compute = COMPUTE_DTYPES[arguments.dtype].itemsize
        wide = isinstance(config, ModelConfig) and config.residual_dtype == "float32"
        tokens = arguments.batch * arguments.length
        moved = unavoidable_bytes(
            engine.model, tokens=tokens, compute_bytes=compute, hidden_bytes=max(compute, 4) if wide else compute
        )
    flops = engine.model.training_flops(arguments.length)
    engine.close()
    return Ours(timing, flops, peak, recorded if arguments.floor else None, moved, sent)


def describe_floor(floor: Floor, step_seconds: float) -> dict[str, Any]:
    """The floor's part of the JSON line; times in milliseconds a step."""
    return {
        "floor_share": floor.seconds / step_seconds,
        "floor_milliseconds": floor.seconds * 1e3,
        "floor_parts_milliseconds": {
            "products": floor.products * 1e3,
            "products_alone": floor.products_alone * 1e3,
            "products_in_step": floor.products_in_step * 1e3,
            "mixing": floor.mixing * 1e3,
            "bytes": floor.bytes * 1e3,
        },
        "floor_mixing_milliseconds": {name: seconds * 1e3 for name, seconds in floor.mixing_seconds.items()},
        "floor_products": floor.product_rows,
        "floor_moved_bytes": floor.moved_bytes,
        "copy_bytes_per_second": floor.copy_bandwidth,
    }


def measure_peer(arguments: argparse.Namespace, config: AnyModelConfig, mesh: Mesh) -> dict[str, Any]:
    """The same clock around the peer's step, on the same tokens."""
    assert isinstance(config, ModelConfig), type(config)
    torch.cuda.reset_peak_memory_stats()
    if is_own_model(arguments.peer, config):
        with scans_by_fla():
            timing = measure_ours(argparse.Namespace(**{**vars(arguments), "floor": False}), config, mesh).timing
        name = "our model on its scan"
    else:
        started = time.perf_counter()
        model = build_peer(arguments.peer, config, device=mesh.device)
        name = type(model).__name__
        start = peer_step(model, random_batches(arguments, config, mesh)[0].tokens, lr=1e-4)
        timing = time_steps(start, warmup=arguments.warmup, steps=arguments.steps, started=started)
    return {
        "library": arguments.peer,
        "class": name,
        "tokens_per_second": arguments.batch * arguments.length / timing.median_seconds,
        "step_seconds_median": timing.median_seconds,
        "step_seconds_min_max": [min(timing.seconds), max(timing.seconds)],
        "peak_memory_gib": peak_memory_bytes(mesh.device) / 2**30,
        "build_to_first_step_seconds": timing.first_step_seconds,
        "losses": timing.losses,
    }


def release_memory() -> None:
    """What the last model held goes back to the device."""
    torch._dynamo.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def commit() -> str:
    """The commit of this checkout; empty outside of one."""
    result = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return result.stdout.strip()


def main() -> int:
    arguments = parse_arguments()
    device = compute_device()
    try:
        with process_group(device) if arguments.alone == 1 else alone(arguments.alone, device):
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
