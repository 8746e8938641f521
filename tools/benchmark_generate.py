"""Decoding speed of a model with random weights, against the time of its memory traffic. Prints a JSON line a case.

python tools/benchmark_generate.py transnormerllm-1b --batch 1 16 128 --prompt-length 128 --new-tokens 256
python tools/benchmark_generate.py hgrn2-1b model.vocab_size=50304 --modes graph --samplings greedy --profile
python tools/benchmark_generate.py transnormerllm-385m model.hidden_size=64 "model.layers=[{repeat=2,sublayers=[
    {type='transnormer',num_heads=4},{type='glu',intermediate_size=96}]}]" --batch 1 2 --dtype float32

Times decoding alone, from the end of the prompt, as `megalin generate` runs it: an untimed pass compiles, captures and
warms up, then the median of --passes counts. The bound of a step is the bytes that it cannot avoid over the bandwidth
of a device copy measured in the same run: weights read once (of an input table that is not the head, the batch's rows),
and every sequence's state read and written once; the cache of softmax attention is read once, at its mean size.
--profile prints the kernels of one eager step: their number, and their time.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from megalin.commands.base import model_from
from megalin.errors import ConfigError
from megalin.generation import Sampling, cast_weights
from megalin.generation.decoder import Decoder, capture_cuda_graph, grows
from megalin.generation.sampling import check_sampling
from megalin.model.config import EncoderConfig
from megalin.model.language_model import LanguageModel
from megalin.parallel.initialisation import init_weights
from megalin.parallel.process_group import compute_device
from megalin.terminal_output import exit_code
from megalin.train.compute_dtypes import COMPUTE_DTYPES

COPY_BYTES = {"cuda": 2**30, "cpu": 2**26}
MODES = ("eager", "graph")
SAMPLINGS = ("greedy", "sampled")


class Traffic(NamedTuple):
    """Bytes that a step cannot avoid."""

    weights: int
    state: int
    """Of all sequences, read and written."""


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", help="a preset or a config file")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="overrides of model.*")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16, 128], help="sequences (1 16 128)")
    parser.add_argument("--prompt-length", type=int, default=128, help="tokens of each prompt (128)")
    parser.add_argument("--new-tokens", type=int, default=256, help="tokens generated for each prompt (256)")
    parser.add_argument(
        "--modes", nargs="+", choices=MODES, help="default: both on a GPU, where the model allows a graph"
    )
    parser.add_argument("--samplings", nargs="+", choices=SAMPLINGS, default=list(SAMPLINGS), help="default: both")
    parser.add_argument("--temperature", type=float, default=1.0, help="of the sampled cases (1)")
    parser.add_argument("--top-k", type=int, help="of the sampled cases; left out: every token")
    parser.add_argument("--top-p", type=float, help="of the sampled cases; left out: every token")
    parser.add_argument("--dtype", choices=sorted(COMPUTE_DTYPES), default="bfloat16", help="of the weights (bfloat16)")
    parser.add_argument("--passes", type=int, default=3, help="timed passes; the median is reported (3)")
    parser.add_argument("--profile", action="store_true", help="print the kernels of one eager step; GPU only")
    parsed = parser.parse_intermixed_args(arguments)
    for name in ("prompt_length", "new_tokens", "passes"):
        if getattr(parsed, name) < 1 + (name == "new_tokens"):
            parser.error(
                f"--{name.replace('_', '-')} {getattr(parsed, name)}: use at least {1 + (name == 'new_tokens')}"
            )
    if min(parsed.batch) < 1:
        parser.error(f"--batch {min(parsed.batch)}: use at least 1")
    return parsed


def build(args: argparse.Namespace, device: torch.device) -> LanguageModel:
    """The model with its initial weights. Raises ConfigError for an encoder."""
    config = model_from(args.config, args.overrides)
    if isinstance(config, EncoderConfig):
        raise ConfigError(f"{args.config} is an encoder, which generates no text; give a decoder")
    model = LanguageModel(config)
    model.to_empty(device=device)
    init_weights(model, 0)
    cast_weights(model, COMPUTE_DTYPES[args.dtype])
    return model.requires_grad_(False).eval()


def copy_bandwidth(device: torch.device) -> float:
    """Bytes a second, read and written, of a copy on the device; the median of ten."""
    source = torch.empty(COPY_BYTES[device.type], dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    return 2 * source.nbytes / statistics.median(seconds(lambda: target.copy_(source), device) for _ in range(10))


def seconds(call: Callable[[], object], device: torch.device) -> float:
    """Wall time of a call until the device has finished."""
    synchronize(device)
    start = time.perf_counter()
    call()
    synchronize(device)
    return time.perf_counter() - start


def synchronize(device: torch.device) -> None:
    """Waits until the device has finished."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def size(tensors: Iterator[Tensor] | list[Tensor]) -> int:
    """Bytes of tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def traffic(model: LanguageModel, state: list[Tensor], args: argparse.Namespace, batch: int) -> Traffic:
    """Bytes of a step, from the state after the prompts."""
    weights, table = size(model.parameters()), model.embedding.weight
    if not model.config.tie_embeddings:
        weights -= size([table]) - batch * table.shape[1] * table.element_size()
    if grows(model):  # a cache with room for all tokens, of which a step reads those so far
        filled = (args.prompt_length + args.new_tokens / 2) / (args.prompt_length + args.new_tokens)
        return Traffic(weights, round(size(state) * filled))
    return Traffic(weights, 2 * size(state))


def measure(
    model: LanguageModel, args: argparse.Namespace, batch: int, sampling: Sampling, mode: str
) -> dict[str, object]:
    """Fields of one case: the time of a step, its rate and the bound's."""
    device = model.embedding.weight.device
    decoder = Decoder(
        model,
        sampling,
        batch_size=batch,
        max_length=args.prompt_length + args.new_tokens,
        capture=capture_cuda_graph if mode == "graph" else None,
    )
    generator = torch.Generator().manual_seed(0)
    shape = (batch, args.prompt_length)
    prompts = torch.randint(0, model.config.vocab_size, shape, generator=generator).tolist()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)

    def decode() -> None:
        for _ in decoder.blocks(args.new_tokens):
            pass

    times = []
    for _ in range(args.passes + 1):
        decoder.start(prompts, range(batch))
        times.append(seconds(decode, device))
    if args.profile and mode == "eager":
        print_profile(decoder, f"{args.config}, batch {batch}")
    decoder.start(prompts, range(batch))
    moved = traffic(model, decoder.state_tensors(), args, batch)
    step = statistics.median(times[1:]) / (args.new_tokens - 1)
    return {
        "step_milliseconds": step * 1e3,
        "step_milliseconds_min_max": [edge(times[1:]) / (args.new_tokens - 1) * 1e3 for edge in (min, max)],
        "tokens_per_second": batch / step,
        "first_pass_seconds": times[0],
        **moved._asdict(),
        "peak_memory_gib": torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else None,
    }


def print_profile(decoder: Decoder, title: str) -> None:
    """Prints the kernels of one step, longest first."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        decoder.step()
        torch.cuda.synchronize()
    found = [event for event in profile.key_averages() if event.device_time_total > 0]
    events = sorted(found, key=lambda event: -event.device_time_total)
    total, count = sum(event.device_time_total for event in events), sum(event.count for event in events)
    print(f"{title}: {count} kernels, {total:.0f} us", file=sys.stderr)
    for event in events:
        print(f"{event.device_time_total:9.1f} us {event.count:5d} x {event.key[:100]}", file=sys.stderr)


def environment(device: torch.device) -> dict[str, object]:
    """Device, versions and commit."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return {"device": name, "torch": torch.__version__, "commit": commit.stdout.strip()}


def benchmark(args: argparse.Namespace) -> None:
    """Prints a line for each batch, sampling and mode."""
    check_sampling(Sampling(args.temperature, args.top_k, args.top_p))
    device = compute_device()
    model = build(args, device)
    modes = args.modes or (["eager"] if device.type == "cpu" else list(MODES))
    if "graph" in modes and device.type == "cpu":
        raise ConfigError("--modes graph: needs a GPU; use --modes eager")
    if args.profile and device.type == "cpu":
        raise ConfigError("--profile: needs a GPU; leave it out")
    bandwidth = copy_bandwidth(device)
    for batch in args.batch:
        for name in args.samplings:
            sampled = Sampling(args.temperature, args.top_k, args.top_p)
            for mode in modes:
                found = measure(model, args, batch, sampled if name == "sampled" else Sampling(), mode)
                bound = (found["weights"] + found["state"]) / bandwidth
                line = {
                    "model": args.config,
                    "overrides": args.overrides,
                    "dtype": args.dtype,
                    "batch": batch,
                    "prompt_length": args.prompt_length,
                    "new_tokens": args.new_tokens,
                    "sampling": sampled._asdict() if name == "sampled" else "greedy",
                    "mode": mode,
                    **found,
                    "copy_bytes_per_second": bandwidth,
                    "bound_milliseconds": bound * 1e3,
                    "bound_tokens_per_second": batch / bound,
                    "bound_fraction": bound * 1e3 / found["step_milliseconds"],
                    **environment(device),
                }
                print(json.dumps(line), flush=True)
                gc.collect()
                if device.type == "cuda":
                    torch.cuda.empty_cache()


def main(arguments: list[str] | None = None) -> int:
    """Runs the tool; returns 0, or the exit code of the printed error."""
    args = parse_arguments(arguments)
    return exit_code(lambda: benchmark(args))


if __name__ == "__main__":
    sys.exit(main())
