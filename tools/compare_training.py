"""Trains a model in megalin and in an ordinary PyTorch loop on another library's class, and compares the losses.

Both start from the weights that the other library draws, and read the same batches: `transformers` has LLaMA, with
`flash-linear-attention` HGRN2, Rodimus and others that `megalin export` knows.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from megalin.data.sources import open_training
from megalin.errors import ConfigError
from megalin.interop.weights.exporting import check_empty, write_settings
from megalin.interop.weights.importing import import_hf
from megalin.interop.weights.layouts import layout_of_model
from megalin.model.config import ModelConfig
from megalin.optim.schedule import learning_rate
from megalin.parallel.cross_entropy import IGNORED_LABEL
from megalin.parallel.mesh import Mesh, check_world_size
from megalin.parallel.process_group import compute_device, process_group
from megalin.terminal_output import exit_code
from megalin.train.config import RunConfig, load_run_config
from megalin.train.loop import train
from megalin.train.step_data import training_loader

LIBRARIES = {"fla": "fla", "transformers": "transformers"}
"""Module that registers the classes of a format."""
NOT_DECAYED = ("lower_bounds",)
"""Endings of the names of matrices without weight decay."""


def main(arguments: list[str] | None = None) -> int:
    """Runs the tool; returns 0, 1 if the losses differ by more than the tolerance, or the exit code of an error."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("config", type=Path, help="config of a run, such as examples/language_modelling/base.toml")
    add("overrides", nargs="*", metavar="key=value", help="changes to it, such as train.steps=400")
    add("--folder", type=Path, required=True, help="empty folder for the weights, the run and losses.json")
    add("--tolerance", type=float, default=0.01, help="largest relative difference of two losses (0.01)")
    args = parser.parse_intermixed_args(arguments)
    different = False

    def run() -> None:
        nonlocal different
        different = _run(args)

    return exit_code(run) or int(different)


def _run(args: argparse.Namespace) -> bool:
    config, device = load_run_config(args.config, args.overrides), compute_device()
    check_empty(args.folder)
    check_comparable(config)
    theirs = draw_weights(config, args.folder / "start")
    import_hf(args.folder / "start", args.folder / "initial")
    initial = config.train.model_copy(update={"initial_weights": str(args.folder / "initial")})
    with process_group(device):
        train(config.model_copy(update={"train": initial}), device, args.folder / "ours")
        lines = (args.folder / "ours" / "metrics.jsonl").read_text().splitlines()
        ours = [json.loads(line)["loss"] for line in lines]
        others = []
        for step, loss in enumerate(ordinary_loop(theirs.to(device), config, Mesh(config.parallel, device)), 1):
            others.append(loss)
            if step in (1, config.train.steps) or step % config.train.log_every_steps == 0:
                print(f"step {step:6}: {ours[step - 1]:.6f} against {loss:.6f}", flush=True)
    (args.folder / "losses.json").write_text(json.dumps({"megalin": ours, type(theirs).__name__: others}, indent=1))
    return differ(ours, others, args.tolerance)


def differ(ours: Sequence[float], others: Sequence[float], tolerance: float) -> bool:
    """Prints the largest relative difference; True where it is above the tolerance."""
    differences = [abs(a - b) / b for a, b in zip(ours, others, strict=True)]
    worst = max(differences)
    print(
        f"largest relative difference {worst:.2e} at step {differences.index(worst) + 1} of {len(ours)}, mean "
        f"{sum(differences) / len(ours):.2e}; tolerance {tolerance:g}"
    )
    return worst > tolerance


def check_comparable(config: RunConfig) -> None:
    """Raises ConfigError for a run that an ordinary loop in one process does not do."""
    problems = []
    if not isinstance(config.model, ModelConfig):
        problems.append('model.kind = "encoder": only decoders are compared')
    if config.data.isolate_documents:
        problems.append("data.isolate_documents = true: other classes read a sample as one document; set it to false")
    if problems:
        raise ConfigError("\n".join(problems))
    check_world_size(config.parallel, 1)


def draw_weights(config: RunConfig, folder: Path) -> nn.Module:
    """The other library's model of the same size in fp32, with weights that it draws; saved in `folder`.

    Raises:
        ConfigError: no class of another library computes this model, or its library is missing.
    """
    assert isinstance(config.model, ModelConfig), type(config.model)
    layout = layout_of_model(config.model, None)
    transformers = _library("transformers")
    _library(LIBRARIES.get(layout.format, layout.format))
    folder.mkdir(parents=True)
    write_settings(folder, config.model, layout, None, length=config.data.sequence_length)
    torch.manual_seed(config.train.seed)
    settings = transformers.AutoConfig.from_pretrained(folder)
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(settings, dtype=torch.float32)
    model.save_pretrained(folder)  # type: ignore[operator]
    return model


def _library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        package = {"fla": "flash-linear-attention"}.get(name, name)
        raise ConfigError(f"the comparison needs the library {name}; install it: pip install {package}") from None


def ordinary_loop(model: nn.Module, config: RunConfig, mesh: Mesh) -> Iterator[float]:
    """Losses of each step of plain PyTorch on the batches of the run: `model(input_ids).logits`, cross entropy, torch's
    AdamW with the decay of the matrices alone, the run's clipping and schedule; under autocast in bf16."""
    train_config, optimizer_config = config.train, config.optimizer
    named = list(model.named_parameters())
    kept = [parameter for name, parameter in named if parameter.ndim < 2 or name.endswith(NOT_DECAYED)]
    decayed = [parameter for name, parameter in named if parameter.ndim >= 2 and not name.endswith(NOT_DECAYED)]
    decays = ((decayed, optimizer_config.weight_decay), (kept, 0.0))
    optimizer = torch.optim.AdamW(
        [{"params": group, "weight_decay": decay} for group, decay in decays if group],
        lr=optimizer_config.lr,
        betas=(optimizer_config.betas[0], optimizer_config.betas[1]),
        eps=optimizer_config.eps,
    )
    data = open_training(
        config.data,
        config.model.vocab_size,
        seed=train_config.seed,
        steps=train_config.steps,
        global_batch_size=train_config.global_batch_size,
        folder=Path(),
    )
    model.train()
    with training_loader(config, data, mesh) as loader:
        for step in range(train_config.steps):
            batches = loader.step(step).batches
            count = sum(int(batch.label_counts().sum()) for batch in batches)
            yield _step(model, optimizer, config, batches, count, step)


def _step(
    model: nn.Module, optimizer: torch.optim.Optimizer, config: RunConfig, batches: Sequence[Any], count: int, step: int
) -> float:
    """One update; the mean loss of its `count` labels."""
    device, total = next(model.parameters()).device, 0.0
    optimizer.zero_grad()
    for batch in batches:
        tokens, labels = batch.tokens.to(device), batch.labels.to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=config.train.dtype == "bfloat16"):
            logits = model(tokens).logits
        flat = logits.flatten(0, 1).float()
        loss = F.cross_entropy(flat, labels.flatten(), ignore_index=IGNORED_LABEL, reduction="sum") / count
        loss.backward()
        total += loss.item()
    if config.optimizer.max_grad_norm is not None:
        nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.max_grad_norm)
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(config.optimizer, config.schedule, step, config.train.steps)
    optimizer.step()
    return total


if __name__ == "__main__":
    sys.exit(main())
