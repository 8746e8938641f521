"""Resuming a run: the state in its checkpoints, and the checks before a run continues from one."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from megalin.checkpoint.load import load, newest
from megalin.checkpoint.manifest import Checkpoint
from megalin.config import parse
from megalin.data.sources import SAMPLES, SHARD_DIGESTS, Training
from megalin.errors import CheckpointError, ConfigError
from megalin.optim.config import ScheduleConfig
from megalin.optim.schedule import learning_rate
from megalin.parallel.agreement import on_every_rank, rank
from megalin.train.config import RunConfig
from megalin.train.engine import Engine
from megalin.train.environment import versions
from megalin.train.identity import (
    Difference,
    IdentityEntry,
    config_entries,
    differences,
    recorded_entries,
    refusal,
    values_of,
)
from megalin.train.identity_file import IdentityFile, Segment
from megalin.train.initial_weights import named_checkpoint
from megalin.train.open_run import check_same_model, saved_model
from megalin.train.rollback import skipped_before
from megalin.train.shard_check import check_records
from megalin.train.train_state import TrainState, read_state

_log = logging.getLogger(__name__)

_STARTS = ("train.initial_weights", "train.branch_from")
"""Keys that only the first start of a run reads."""
_TABLES = ("data.masking", "data.classification")
"""Tables that earlier versions recorded with the order of samples too."""
_SCHEDULE_TOLERANCE = 1e-6


class Resumption(NamedTuple):
    """Start of a run from a checkpoint, or from none."""

    inputs: Mapping[str, IdentityEntry]
    """The identity of the run besides config and samples."""
    checkpoint: Checkpoint | None = None
    segment: Segment | None = None
    """Values that differ from those of the steps before, none of which is refused; None without any."""
    earlier: Sequence[Segment] = ()
    """Those of earlier starts."""

    @property
    def segments(self) -> list[Segment]:
        """The changes at every start so far."""
        return [*self.earlier, *([] if self.segment is None else [self.segment])]

    def report_lines(self) -> list[str]:
        """A line on the changes of this start; none without any."""
        return [] if self.segment is None else [str(self.segment)]

    def values(self, config: RunConfig) -> dict[str, Any]:
        """Contents of a run folder's `identity.json`."""
        inputs, keys = values_of(self.inputs), values_of(config_entries(config))
        return IdentityFile(config=keys, inputs=inputs, segments=self.segments).model_dump(mode="json")


def find_checkpoint(root: Path, config: RunConfig, data: Training, inputs: Mapping[str, IdentityEntry]) -> Resumption:
    """The newest checkpoint in `root` if there is one, else that of `train.branch_from`. It is checked before anything
    is built: its model, its number of steps, and the recorded identity of the run.

    Args:
        inputs: the identity besides config and samples (`identity.run_entries`).

    Raises:
        ConfigError: on every rank, a checkpoint whose run had another value that is refused, such as another order of
            samples, or a schedule of the learning rate that would jump.
        DataError: on every rank, shards with other bytes than those the run was trained on.
        CheckpointError: a checkpoint of a different model or beyond `train.steps`, none that verifies, or none to
            branch from.
    """
    checkpoint, trunk = newest(root), config.train.branch_from
    is_branch = checkpoint is None and trunk is not None
    if checkpoint is None:
        if trunk is None:
            return Resumption(inputs)
        checkpoint = named_checkpoint("train.branch_from", trunk)
        if checkpoint.step >= config.train.steps:
            raise CheckpointError(
                f"train.branch_from = {trunk!r}: {checkpoint.path} has {checkpoint.step} finished steps, which leaves "
                f"none of train.steps = {config.train.steps}; name an earlier one as RUN@STEP, or raise train.steps"
            )
    found, state = checkpoint, read_state(checkpoint)
    check_same_model(config.model, found)
    changes = on_every_rank(  # hosts may have different disks
        lambda: _compare(found, state, config, data, inputs, is_branch=is_branch), list[Difference]
    )[0]
    if state.order is None:
        return Resumption(inputs, checkpoint)
    if checkpoint.step > config.train.steps:
        raise CheckpointError(
            f"{checkpoint.path} holds {checkpoint.step} finished steps, train.steps is {config.train.steps}; "
            "raise train.steps or start in a new run folder"
        )
    if not is_branch:
        _check_schedule(checkpoint, state, config)
    now = {each.name: [each.recorded, each.found] for each in changes}
    segment = Segment(step=checkpoint.step, changes=now) if changes else None
    return Resumption(inputs, checkpoint, segment, state.segments)


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


def checkpoint_state(config: RunConfig, data: Training, step: int, resumption: Resumption) -> dict[str, Any]:
    """Contents of `train_state.json` in the checkpoint after `step` steps."""
    state = TrainState(
        step=step,
        order=data.identity(step),
        config=config.model_dump(mode="json"),
        versions=versions(),
        inputs=values_of(resumption.inputs),
        segments=resumption.segments,
    )
    return state.model_dump(mode="json", exclude={"source"})


def _compare(
    checkpoint: Checkpoint,
    state: TrainState,
    config: RunConfig,
    data: Training,
    inputs: Mapping[str, IdentityEntry],
    *,
    is_branch: bool,
) -> list[Difference]:
    """The reported differences between a run and the record of a checkpoint; of weights without a step of a run, of
    which only `train.initial_weights` is compared, none.

    Raises:
        ConfigError: a difference that is refused.
        DataError: shards with other bytes.
    """
    recorded = {**recorded_entries(state.config, saved_model(checkpoint)), **state.inputs}
    entries = {**config_entries(config), **inputs}
    if is_branch:
        for key in _STARTS:
            del entries[key]
    if state.order is None:
        recorded = {key: recorded.get(key) for key in _STARTS}
    saved = {name: value for name, value in (state.order or {}).items() if name not in {*entries, *_TABLES}}
    given = {}
    if state.order is not None:
        given = data._replace(skipped=skipped_before(checkpoint)).identity(checkpoint.step)
    shards = saved.pop(SHARD_DIGESTS, None), given.pop(SHARD_DIGESTS, None)
    samples = saved.pop(SAMPLES, None), given.pop(SAMPLES, None)
    for name in saved.keys() | given.keys():
        recorded[name], entries[name] = saved.get(name), IdentityEntry(given.get(name), "refused")
    found = differences(recorded, entries)
    _refuse(checkpoint, found)
    if state.order is not None:
        _check_shards(checkpoint, data, *shards)  # before samples, as it names the file
        if samples[0] is not None:  # a checkpoint of an earlier version has none
            _refuse(checkpoint, differences({SAMPLES: samples[0]}, {SAMPLES: IdentityEntry(samples[1], "refused")}))
    return [each for each in found if each.change == "reported"]


def _refuse(checkpoint: Checkpoint, found: Sequence[Difference]) -> None:
    """Raises ConfigError for those of the differences that are refused."""
    if refused := [each for each in found if each.change == "refused"]:
        raise ConfigError(
            f"{checkpoint.path} was made with other values, which a run must keep; restore them, or start in a new run "
            f"folder (from these weights with train.initial_weights={checkpoint.path.parents[1]}):\n{refusal(refused)}"
        )


def _check_schedule(checkpoint: Checkpoint, state: TrainState, config: RunConfig) -> None:
    """Checks that the learning rate goes on from the ratio to its peak that it had.

    Raises:
        ConfigError: it jumps, and schedule.allow_jump is not set.
    """
    try:
        saved = parse(ScheduleConfig, state.config["schedule"], str(checkpoint.path))
        steps = int(state.config["train"]["steps"])
    except (ConfigError, KeyError, TypeError, ValueError):  # of a version with other schedules
        return
    if config.schedule.allow_jump or checkpoint.step > steps:
        return
    peak, last = config.optimizer.model_copy(update={"lr": 1.0}), checkpoint.step - 1
    before = learning_rate(peak, saved, last, steps)
    now = learning_rate(peak, config.schedule, last, config.train.steps)
    if abs(now - before) > _SCHEDULE_TOLERANCE:
        raise ConfigError(
            f"the learning rate of step {checkpoint.step} was {before:.4g} of its peak with the schedule of "
            f"{checkpoint.path} over {steps} steps, and is {now:.4g} of it with this schedule over "
            f"train.steps = {config.train.steps}: it would jump. Restore schedule and train.steps, branch with a "
            'schedule of its own (train.branch_from; type = "constant" or "wsd" before its decay can be prolonged), or '
            "set schedule.allow_jump=true"
        )


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
