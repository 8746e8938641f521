"""Loading of the newest valid checkpoint, or of a step's, into plain tensors or DTensors, on any mesh or without one.

`newest` and `of_step` run one broadcast, and a broadcast and an all-gather per directory that they check; `load` two
all-gathers.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import load as engine_load

from megalin.checkpoint.index import DTYPE_NAMES, Index
from megalin.checkpoint.manifest import Checkpoint, directory_step, files_stamp, step_directory
from megalin.checkpoint.storage import SafetensorsReader, header_problems
from megalin.checkpoint.verification import check_directory
from megalin.errors import CheckpointError, MegalinError
from megalin.parallel.agreement import on_every_rank, on_rank_zero, rank, world_size
from megalin.slow_work import slow_work

_VOCABULARY = "embedding.weight"
_log = logging.getLogger(__name__)


def newest(root: str | Path, *, before: int | None = None) -> Checkpoint | None:
    """The newest checkpoint in `root` with all files valid; None if `root` has no checkpoint directory.

    All ranks call it and get the same result; each hashes its part of the files. An invalid directory is skipped with
    a warning that has the reason.

    Args:
        before: the newest of fewer finished steps.

    Raises:
        CheckpointError: there are checkpoint directories, and none is valid. (Starting from step 0 would be the wrong
            remedy.)
    """
    root = Path(root)
    problems = []
    for step in reversed([step for step in saved_steps(root) if before is None or step < before]):
        checked = check_directory(root / step_directory(step))
        if isinstance(checked, Checkpoint):
            return checked
        problems.append(checked)
        if rank() == 0:
            _log.warning("checkpoint skipped: %s", problems[-1])
    if problems:
        raise CheckpointError(
            f"{root}: no valid checkpoint; restore one, or move these away to start from step 0:\n"
            + "\n".join(problems)
        )
    return None


def of_step(root: str | Path, step: int) -> Checkpoint:
    """The checkpoint of `step` finished steps in `root`, with all files valid; all ranks call it.

    Raises:
        CheckpointError: there is none, with the nearest ones, or it is not valid.
    """
    root = Path(root)
    steps = saved_steps(root)
    if step not in steps:
        below, above = [each for each in steps if each < step][-1:], [each for each in steps if each > step][:1]
        nearest = " and ".join(str(each) for each in below + above)
        verb = "are" if below and above else "is"
        hint = f"nearest {verb} {nearest}" if nearest else "there is none yet; train the run first (megalin train)"
        raise CheckpointError(f"{root}: no checkpoint of step {step}; {hint}")
    checked = check_directory(root / step_directory(step))
    if isinstance(checked, Checkpoint):
        return checked
    raise CheckpointError(f"{checked}; restore it, or choose another step")


def saved_steps(root: str | Path) -> list[int]:
    """Steps of the checkpoint directories in `root`, valid or not, in ascending order. One broadcast."""
    return on_rank_zero(partial(_steps, Path(root)))


def _steps(root: Path) -> list[int]:
    if not root.is_dir():
        return []
    steps = (directory_step(entry.name) for entry in root.iterdir())
    return sorted(step for step in steps if step is not None)


def load(checkpoint: Checkpoint, tensors: Mapping[str, Tensor], *, ignore: Sequence[str] = ()) -> None:
    """Fills `tensors` in place from the checkpoint; all ranks call it. Works without a process group too.

    Args:
        tensors: by global name, plain or DTensor. Global shapes and dtypes must match the checkpoint, and so must the
            names of all ranks together: a pipeline stage loads its own.
        ignore: prefixes of names that may be in the checkpoint but not in `tensors`: `("optim.",)` loads weights only,
            `("",)` any tensors.

    Raises:
        CheckpointError: on every rank, before any tensor is written: lists every tensor that is missing, extra, or of
            another shape or dtype, and every file that does not match the index.
    """
    indices: list[Index] = []
    checks = on_every_rank(partial(_check, checkpoint, tensors, ignore, indices), _Check)
    problems = dict.fromkeys(problem for check in checks for problem in check.problems)
    unused = set.intersection(*(set(check.left_over) for check in checks))
    problems |= dict.fromkeys(checks[0].left_over[name] for name in checks[0].left_over if name in unused)
    if problems:
        raise CheckpointError(
            f"{checkpoint.path} does not fit the model:\n" + "\n".join(f"  {line}" for line in problems)
        )
    with slow_work(f"loading {checkpoint.path}", shown=rank() == 0):
        on_every_rank(partial(_read, checkpoint, tensors, indices[0]))


class _Check(NamedTuple):
    """Problems that one rank found."""

    problems: list[str]
    left_over: dict[str, str]
    """Checkpoint tensors that this rank does not load, by name: the message if no rank loads it."""


def _check(
    checkpoint: Checkpoint, tensors: Mapping[str, Tensor], ignore: Sequence[str], indices: list[Index]
) -> _Check:
    index = checkpoint.index()
    indices.append(index)
    problems = []
    for name, tensor in tensors.items():
        record = index.tensors.get(name)
        if record is None:
            problems.append(f"{name}: missing from the checkpoint; the model has shape {list(tensor.shape)}")
        elif record.shape != list(tensor.shape):
            problems.append(shape_problem(name, record.shape, list(tensor.shape)))
        elif record.dtype != DTYPE_NAMES.get(tensor.dtype):
            problems.append(f"{name}: dtype {record.dtype} in the checkpoint, {tensor.dtype} in the model")
    left_over = {
        name: f"{name}: in the checkpoint with shape {record.shape}, not in the model"
        for name, record in index.tensors.items()
        if name not in tensors and not name.startswith(tuple(ignore))
    }
    files = sorted({chunk.file for record in index.tensors.values() for chunk in record.chunks})
    return _Check(problems + header_problems(checkpoint.path, index, files[rank() :: world_size()]), left_over)


def shape_problem(name: str, saved: Sequence[int], shape: Sequence[int]) -> str:
    """Message for a tensor with the shape `saved` in the checkpoint and `shape` in the model."""
    problem = f"{name}: shape {list(saved)} in the checkpoint, {list(shape)} in the model"
    if name == _VOCABULARY and saved[1:] == shape[1:]:
        problem += (
            f": different vocabularies ({saved[0]} and {shape[0]} ids); use the tokenizer and vocabulary size that the "
            "checkpoint was trained with"
        )
    return problem


def _read(checkpoint: Checkpoint, tensors: Mapping[str, Tensor], index: Index) -> None:
    """Reads this rank's boxes; planning needs the index only, so there is no communication. Raises CheckpointError if
    the files are no longer those that were verified."""
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            engine_load(
                dict(tensors), storage_reader=SafetensorsReader(checkpoint.path, index), planner=planner, no_dist=True
            )
    except CheckpointException as error:
        failure = next(iter(error.failures.values()))[0]
        if isinstance(failure, (MegalinError, KeyboardInterrupt, SystemExit)):
            raise failure from None
        raise RuntimeError(f"loading {checkpoint.path} failed: {error}") from None
    if checkpoint.stamp and files_stamp(checkpoint.path) != checkpoint.stamp:
        raise CheckpointError(f"{checkpoint.path}: changed since it was verified; run the same command again")
