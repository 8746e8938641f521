"""Training speed of a preset on random tokens: tokens/s, matrix rate reached, memory. One JSON line at the end.

python tools/benchmark_train.py transnormerllm-1b-64k --batch 4 --length 8192 --compile
torchrun --nproc-per-node 2 tools/benchmark_train.py transnormerllm-1b-64k --tp 2 ...
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time

import torch

from megalin.commands.base import model_from
from megalin.data.packing import Batch
from megalin.errors import MegalinError
from megalin.optim.adamw import OptimizerConfig, build_optimizer
from megalin.parallel.mesh import Mesh, ParallelConfig, compute_device, process_group
from megalin.train.build import COMPUTE_DTYPES, build_model
from megalin.train.hardware import peak_memory_bytes
from megalin.train.step import train_step


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a preset or a config file")
    parser.add_argument("overrides", nargs="*", metavar="model.key=value")
    parser.add_argument("--batch", type=int, default=4, help="sequences a data-parallel rank and step (4)")
    parser.add_argument("--length", type=int, default=8192, help="tokens a sequence (8192)")
    parser.add_argument("--document-length", type=int, help="tokens a packed document (the whole sequence)")
    parser.add_argument("--dtype", choices=sorted(COMPUTE_DTYPES), default="bfloat16")
    parser.add_argument("--compile", action="store_true", help="compile the blocks")
    parser.add_argument("--recompute", action="store_true", help="recompute activations in the backward")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--sequence-parallel", action="store_true")
    parser.add_argument("--warmup", type=int, default=5, help="steps before the clock starts (5)")
    parser.add_argument("--steps", type=int, default=20, help="timed steps; the median counts (20)")
    parser.add_argument("--profile", action="store_true", help="print where one more step spends its GPU time")
    return parser.parse_args()


def random_batch(arguments: argparse.Namespace, vocab_size: int, mesh: Mesh) -> Batch:
    """The same on all ranks of a tensor-parallel group, different over the data axis."""
    generator = torch.Generator().manual_seed(mesh.data.rank)
    ids = torch.randint(0, vocab_size, (arguments.batch, arguments.length + 1), generator=generator)
    document = arguments.document_length or arguments.length
    documents = torch.arange(arguments.length, dtype=torch.int32).div(document, rounding_mode="floor")
    batch = Batch(ids[:, :-1], ids[:, 1:], documents.expand(arguments.batch, -1), torch.arange(arguments.batch))
    return Batch(*(tensor.contiguous().to(mesh.device) for tensor in batch))


def measure(arguments: argparse.Namespace, mesh: Mesh) -> dict[str, object]:
    config = model_from(arguments.model, arguments.overrides)
    started = time.perf_counter()
    model = build_model(
        config,
        mesh,
        compute_dtype=COMPUTE_DTYPES[arguments.dtype],
        recompute=arguments.recompute,
        compile_blocks=arguments.compile,
        seed=0,
    )
    optimizer = build_optimizer(model, OptimizerConfig(lr=1e-4, max_grad_norm=1.0), no_decay=model.no_decay_names())
    batch = random_batch(arguments, config.vocab_size, mesh)
    seconds, losses = [], []
    first_step_seconds = 0.0
    for step in range(arguments.warmup + arguments.steps):
        begin = time.perf_counter()
        # train_step ends by reading the loss on the host, so the clock needs no further synchronisation.
        result = train_step(model, optimizer, [batch], mesh, max_grad_norm=1.0, step=step)
        if step == 0:
            first_step_seconds = time.perf_counter() - started
        if step >= arguments.warmup:
            seconds.append(time.perf_counter() - begin)
        losses.append(result.loss)
    if arguments.profile:
        with torch.profiler.profile() as profile:
            train_step(model, optimizer, [batch], mesh, max_grad_norm=1.0, step=step + 1)
        if mesh.is_first_rank:
            print(profile.key_averages().table(sort_by="self_device_time_total", row_limit=20), file=sys.stderr)
    median = statistics.median(seconds)
    ranks = mesh.device_mesh.size()
    tokens = arguments.batch * arguments.length * mesh.data.size
    return {
        "model": arguments.model,
        "overrides": arguments.overrides,
        "batch": arguments.batch,
        "length": arguments.length,
        "document_length": arguments.document_length or arguments.length,
        "dtype": arguments.dtype,
        "compile": arguments.compile,
        "recompute": arguments.recompute,
        "tp": arguments.tp,
        "sequence_parallel": arguments.sequence_parallel,
        "ranks": ranks,
        "tokens_per_second": tokens / median,
        "step_seconds_median": median,
        "step_seconds_min_max": [min(seconds), max(seconds)],
        "model_tflops_per_second_per_rank": model.training_flops(arguments.length) * tokens / median / ranks / 1e12,
        "peak_memory_gib": peak_memory_bytes(mesh.device) / 2**30,
        "build_to_first_step_seconds": first_step_seconds,
        "losses": losses,
        "device": torch.cuda.get_device_name() if mesh.device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "commit": commit(),
    }


def commit() -> str:
    """The commit of this checkout; empty outside of one."""
    result = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return result.stdout.strip()


def main() -> int:
    arguments = parse_arguments()
    device = compute_device()
    try:
        with process_group(device):
            mesh = Mesh(ParallelConfig(tp=arguments.tp, sequence_parallel=arguments.sequence_parallel), device)
            result = measure(arguments, mesh)
            if mesh.is_first_rank:
                print(json.dumps(result), flush=True)
    except MegalinError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
