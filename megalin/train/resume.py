"""Resuming a run: the state in its checkpoints, and the checks before a run continues from one."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from megalin.checkpoint.load import load, newest
from megalin.checkpoint.manifest import Checkpoint
from megalin.data.sources import LABEL_MASKS, SHARD_DIGESTS, Training
from megalin.errors import CheckpointError, ConfigError
from megalin.parallel.agreement import on_every_rank, rank
from megalin.train.config import RunConfig
from megalin.train.engine import Engine
from megalin.train.environment import versions
from megalin.train.initial_weights import named_checkpoint
from megalin.train.open_run import check_same_model
from megalin.train.rollback import skipped_before
from megalin.train.shard_check import check_records
from megalin.train.train_state import TrainState, read_state

_log = logging.getLogger(__name__)


def find_checkpoint(root: Path, config: RunConfig, data: Training) -> Checkpoint | None:
    """The newest checkpoint in `root` if there is one, else that of `train.branch_from`; None without both. It is
    checked before anything is built: its model, its sample order, its number of steps.

    Raises:
        ConfigError: on every rank, a checkpoint with a different sample order on any rank, or of a run with other
            `train.initial_weights`.
        DataError: on every rank, shards with other bytes than those the run was trained on.
        CheckpointError: a checkpoint of a different model or beyond `train.steps`, none that verifies, or none to
            branch from.
    """
    checkpoint, trunk = newest(root), config.train.branch_from
    if checkpoint is not None:
        _check_initial_weights(checkpoint, config)
    elif trunk is not None:
        checkpoint = named_checkpoint("train.branch_from", trunk)
        if checkpoint.step >= config.train.steps:
            raise CheckpointError(
                f"train.branch_from = {trunk!r}: {checkpoint.path} has {checkpoint.step} finished steps, which leaves "
                f"none of train.steps = {config.train.steps}; name an earlier one as RUN@STEP, or raise train.steps"
            )
    else:
        return None
    state = read_state(checkpoint)
    if state.order is not None:
        on_every_rank(lambda: _check_sample_order(checkpoint, config, data))  # hosts may have different disks
    check_same_model(config.model, checkpoint)
    if state.order is not None and checkpoint.step > config.train.steps:
        raise CheckpointError(
            f"{checkpoint.path} holds {checkpoint.step} finished steps, train.steps is {config.train.steps}; "
            "raise train.steps or start in a new run folder"
        )
    return checkpoint


def resume(checkpoint: Checkpoint, engine: Engine) -> int:
    """Loads a checkpoint of `find_checkpoint` into the engine; returns the number of finished steps. Of weights without
    a step of this run (an import) there are none. Raises CheckpointError, as `Engine.load` does."""
    if read_state(checkpoint).order is None:
        engine.set_weights(partial(_load_all, checkpoint))
        return 0
    engine.load(checkpoint)
    return checkpoint.step


def _load_all(checkpoint: Checkpoint, weights: Mapping[str, Tensor]) -> Collection[str]:
    load(checkpoint, weights)
    return weights.keys()


def _check_initial_weights(checkpoint: Checkpoint, config: RunConfig) -> None:
    """Checks that the run still names the weights it started from: it continues from its own checkpoint."""
    state = read_state(checkpoint)
    saved, given = state.config["train"].get("initial_weights"), config.train.initial_weights
    if saved != given:
        of_its_own = "imported weights" if state.order is None else "random weights"
        started = of_its_own if saved is None else repr(saved)
        restore = "leave it out" if saved is None else f"restore {saved!r}"
        raise ConfigError(
            f"train.initial_weights {'is left out' if given is None else f'= {given!r}'}, but the run started from "
            f"{started} and continues from {checkpoint.path}, without reading initial weights again; {restore}, or "
            "start in a new run folder"
        )


def checkpoint_state(config: RunConfig, data: Training, step: int) -> dict[str, Any]:
    """Contents of `train_state.json` in the checkpoint after `step` steps."""
    state = TrainState(
        step=step,
        order=sample_order(config, data, step),
        config=config.model_dump(mode="json"),
        versions=versions(),
    )
    return state.model_dump(exclude={"source"})


def sample_order(config: RunConfig, data: Training, step: int) -> dict[str, Any]:
    """Everything that determines the samples of the first `step` steps; equal values give the same on any mesh."""
    masking, classification = config.data.masking, config.data.classification
    return {
        "data.masking": None if masking is None else masking.model_dump(mode="json"),
        "data.classification": None if classification is None else classification.model_dump(mode="json"),
        "train.seed": config.train.seed,
        "train.global_batch_size": config.train.global_batch_size,
        "data.sequence_length": config.data.sequence_length,
        "data.isolate_documents": config.data.isolate_documents,
        "data.packing": config.data.packing,
        "data.order": config.data.order,
        **data.identity(step),
    }


def _check_shards(
    checkpoint: Checkpoint, data: Training, saved: dict[str, Any] | None, given: dict[str, Any] | None
) -> None:
    """Checks that the shards have the bytes that the run was trained on, as far as both were read.

    Raises:
        DataError: they have not.
    """
    if saved is None or given is None:
        reason = "data.verify = off" if given is None else f"{checkpoint.path} has no digests of the shards"
        if rank() == 0:
            _log.warning("the bytes of the shards are not compared with those that the run read before: %s", reason)
        return
    prefixes = {use.name: [shard.prefix for shard in use.shards] for use in data.uses}
    check_records(saved, given, prefixes, str(checkpoint.path))


def _check_sample_order(checkpoint: Checkpoint, config: RunConfig, data: Training) -> None:
    state = read_state(checkpoint).order
    assert state is not None, checkpoint.path
    data = data._replace(skipped=skipped_before(checkpoint))
    saved, given = dict(state), sample_order(config, data, checkpoint.step)
    digests = saved.pop(SHARD_DIGESTS, None), given.pop(SHARD_DIGESTS, None)
    # The checkpoint's names too: a label mask that vanished is none of this run's.
    changed = [name for name in {**given, **saved} if saved.get(name) != given.get(name)]
    if not changed:
        _check_shards(checkpoint, data, *digests)
        return
    reason = "a different order of samples, so samples would be lost or repeated; restore these values"
    if changed == [LABEL_MASKS]:
        reason = "other label masks, so the same samples would have other labels; restore the mask files"
    differences = [
        f"{name}: {saved.get(name)!r} in the checkpoint, {given.get(name)!r} in the config" for name in changed
    ]
    raise ConfigError(
        f"{checkpoint.path} was made with {reason} or start in a new run folder (from these weights with "
        f"train.initial_weights={checkpoint.path.parents[1]}):\n  " + "\n  ".join(differences)
    )
