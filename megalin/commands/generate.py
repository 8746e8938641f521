"""`megalin generate`: text from a saved run."""

from __future__ import annotations

import argparse
from pathlib import Path

from megalin.commands.base import Command
from megalin.errors import ConfigError
from megalin.generation import Sampling, generate, load_for_generation
from megalin.parallel.process_group import compute_device


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, help="a run folder")
    parser.add_argument("--prompt", required=True, help="the text to continue")
    parser.add_argument("--max-tokens", type=int, default=128, help="tokens to generate at most (128)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 (default): the likeliest token each time")
    parser.add_argument("--top-k", type=int, help="draw from the k likeliest tokens")
    parser.add_argument("--top-p", type=float, help="draw from the likeliest tokens that together reach p")
    parser.add_argument("--seed", type=int, default=0, help="seed of the draws (0)")


def _run(arguments: argparse.Namespace) -> int:
    if arguments.max_tokens < 1:
        raise ConfigError(f"--max-tokens {arguments.max_tokens}: generate at least 1 token")
    model, tokenizer = load_for_generation(arguments.folder, compute_device())
    sampling = Sampling(arguments.temperature, arguments.top_k, arguments.top_p, arguments.seed)
    prompt = tokenizer.encode(arguments.prompt)
    tokens = generate(
        model,
        prompt,
        max_tokens=arguments.max_tokens,
        sampling=sampling,
        num_ids=tokenizer.vocab_size,
        stop_id=tokenizer.eod_id,
    )
    print(tokenizer.decode([*prompt, *tokens]))
    return 0


COMMAND = Command("continue a prompt with a trained run", _add_arguments, _run)
