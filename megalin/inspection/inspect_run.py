"""Inspection of a checkpoint: forwards of held-out samples, and the statistics of every mixer's decay and gates."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from megalin.checkpoint.load import load
from megalin.checkpoint.manifest import Checkpoint
from megalin.checkpoint.tensors import OPTIMIZER_PREFIX, weights
from megalin.data.batch import batch_to
from megalin.data.config import SplitName
from megalin.data.loader import ValidationLoader
from megalin.data.sources import open_dataset
from megalin.errors import ConfigError
from megalin.files import storage_errors, write_text
from megalin.inspection.statistics import NUM_BINS, GateStatistics, LayerGates
from megalin.launch import launched
from megalin.layers.mixers.base import Mixer
from megalin.model.build import Model
from megalin.parallel.config import ParallelConfig
from megalin.parallel.mesh import Mesh
from megalin.parallel.process_group import compute_device, process_group
from megalin.train.build import build_model
from megalin.train.compute_dtypes import COMPUTE_DTYPES
from megalin.train.config import RunConfig
from megalin.train.open_run import open_run
from megalin.train.pipeline_model import Pipeline
from megalin.train.validation import evaluating

FOLDER_NAME = "inspections"


class Layer(NamedTuple):
    """A mixer of the model."""

    path: str
    """Its module in the model, such as blocks.0.sublayers.0."""
    type: str
    gates: LayerGates | None
    """None for a mixer whose state has no decay."""


class Inspection(NamedTuple):
    """Result for one checkpoint."""

    step: int
    split: str
    num_samples: int
    num_tokens: int
    first_tokens: list[int]
    """Ids of the first sample, whose gates are kept token by token."""
    layers: list[Layer]

    def values(self) -> dict[str, Any]:
        """The result as JSON."""
        layers = [
            {"path": each.path, "type": each.type} | ({"decay": None} if each.gates is None else each.gates.values())
            for each in self.layers
        ]
        fields = ("step", "split", "num_samples", "num_tokens", "first_tokens")
        edges = [edge / NUM_BINS for edge in range(NUM_BINS + 1)]
        return {name: getattr(self, name) for name in fields} | {"histogram_edges": edges, "layers": layers}


def inspection_path(run: Path, step: int) -> Path:
    """The file of the result of a checkpoint."""
    return run / FOLDER_NAME / f"step-{step}.json"


def inspect_run(
    folder: Path,
    overrides: Sequence[str] = (),
    *,
    step: int | None = None,
    num_samples: int = 8,
    split: SplitName = "validation",
) -> Inspection:
    """Runs the first samples of a split through a checkpoint and writes the result to RUN/inspections/step-N.json.

    One process computes all, in the dtype of the run's training.

    Args:
        overrides: of the run's config, without [parallel].
        step: finished steps of the checkpoint; None: the newest one.

    Raises:
        MegalinError: no such checkpoint or split, data that is invalid or missing, several ranks, a file that cannot be
            written.
    """
    _check(overrides, num_samples)
    config, checkpoint = open_run(folder, [*overrides, "parallel={}"], step=step)
    if not config.data.has(split):
        raise ConfigError(
            f"{folder}: the run has no {split} split (data.{split} is empty, and no part of the training shards is "
            f"held out for it); name shards to read: data.{split}=['prefix']"
        )
    device = compute_device()
    with process_group(device):
        model = _load(config, checkpoint, Mesh(ParallelConfig(), device))
        result = _inspect(model, config, split, num_samples, checkpoint.manifest.step, device)
    path = inspection_path(folder, result.step)
    with storage_errors(path):
        path.parent.mkdir(exist_ok=True)
    write_text(path, json.dumps(result.values(), allow_nan=False) + "\n")
    return result


def _check(overrides: Sequence[str], num_samples: int) -> None:
    if num_samples < 1:
        raise ConfigError(f"samples = {num_samples} leaves no token; use at least 1")
    if (world_size := launched().world_size) > 1:
        raise ConfigError(f"one process inspects a run, but {world_size} were started; start it without a launcher")
    for override in overrides:
        if override.strip().startswith(("parallel.", "parallel=")):
            raise ConfigError(f"override {override!r}: one process inspects a run, without [parallel]; remove it")


def _load(config: RunConfig, checkpoint: Checkpoint, mesh: Mesh) -> Model:
    train = config.train
    model = build_model(
        config.model,
        mesh,
        compute_dtype=COMPUTE_DTYPES[train.dtype],
        recompute=False,
        compile_blocks=False,
        seed=train.seed,
    )
    assert not isinstance(model, Pipeline), "one rank"
    load(checkpoint, weights(model), ignore=(OPTIMIZER_PREFIX,))
    model.after_optimizer_step()
    return model


@torch.no_grad()
def _inspect(
    model: Model, config: RunConfig, split: SplitName, num_samples: int, step: int, device: torch.device
) -> Inspection:
    mixers = _mixers(model)
    statistics = [GateStatistics() for _ in mixers]
    first: list[int] = []
    num_tokens = 0
    with (
        open_dataset(config.data, split, config.model.vocab_size, config.train.seed) as dataset,
        evaluating(model),
        _reading(mixers, statistics),
    ):
        loader: ValidationLoader[Any] = ValidationLoader(dataset, micro_batch_size=1, max_samples=num_samples)
        for batch in loader:
            valid = getattr(batch, "valid", torch.ones_like(batch.tokens, dtype=torch.bool))
            first = first or batch.tokens[valid].tolist()
            num_tokens += int(valid.sum())
            model.loss_sums(batch_to(batch, device).inputs())
    layers = [Layer(each.path, each.type, found.result()) for each, found in zip(mixers, statistics, strict=True)]
    return Inspection(step, split, loader.num_samples, num_tokens, first, layers)


class _PlacedMixer(NamedTuple):
    """A mixer, its module's name and its type in the config."""

    path: str
    type: str
    mixer: Mixer


def _mixers(model: Model) -> list[_PlacedMixer]:
    """The input layers and the mixers of all blocks."""
    inputs = zip(model.input_layers, model.input_mixers(), strict=True)
    placed = [_PlacedMixer(f"input_layers.{key}", key, mixer) for key, mixer in inputs]
    for layer, ((_, config), block) in enumerate(zip(model.config.blocks(), model.block_list(), strict=True)):
        for index, (sublayer, mixer) in enumerate(zip(config.sublayers, block.mixers(), strict=True)):
            placed.append(_PlacedMixer(f"blocks.{layer}.sublayers.{index}", sublayer.type, mixer))
    return placed


@contextmanager
def _reading(mixers: Sequence[_PlacedMixer], statistics: Sequence[GateStatistics]) -> Iterator[None]:
    """Adds the gates of each mixer's forward to its statistics."""

    def reader(found: GateStatistics) -> Callable[[nn.Module, tuple[Any, ...], Any], None]:
        def read(mixer: nn.Module, inputs: tuple[Any, ...], _output: Any) -> None:
            assert isinstance(mixer, Mixer)
            x, context, _state = inputs
            gates = mixer.gate_values(x, context)
            if gates is not None:
                found.add(gates, context.documents.valid)

        return read

    with ExitStack() as hooks:
        for placed, found in zip(mixers, statistics, strict=True):
            hooks.enter_context(placed.mixer.register_forward_hook(reader(found)))
        yield
