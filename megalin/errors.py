"""The errors that users see: each names what is wrong, the rule and the remedy, and sets the exit code."""

import sys
from collections.abc import Callable, Iterator


class MegalinError(ValueError):
    """Base of every error that is the user's to mend; the command line prints it without a traceback."""

    exit_code = 1


class ConfigError(MegalinError):
    """A config field, command-line value or mesh that cannot work."""

    exit_code = 2


class DataError(MegalinError):
    """A shard, corpus or tokenizer that is missing, corrupt or does not fit the model."""

    exit_code = 3


class CheckpointError(MegalinError):
    """A checkpoint that is missing, corrupt, or of another model."""

    exit_code = 4


class StorageError(MegalinError):
    """A run folder or file system that cannot be written."""

    exit_code = 5


class KernelError(MegalinError):
    """A compiled kernel that was asked for and cannot run."""

    exit_code = 7


class OperandError(MegalinError):
    """Tensors that an op cannot take: their shapes, dtypes or devices do not fit together."""


class NumericError(MegalinError):
    """A loss or gradient that is not finite."""

    exit_code = 8


class RankFailedError(MegalinError):
    """A rank that raised, died or did not answer in time; the message names it, with its traceback where it has one."""

    exit_code = 9


class PreemptedError(MegalinError):
    """A run that SIGTERM ended before its last step, with all its steps saved."""

    exit_code = 75


def causes(error: BaseException) -> Iterator[BaseException]:
    """The error, what it was raised from, what that was raised from, and so on."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__


def exit_code(run: Callable[[], int | None]) -> int:
    """Runs a tool: what it returns, 0 for None, or the exit code of the user's error, which it prints."""
    try:
        return run() or 0
    except MegalinError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
