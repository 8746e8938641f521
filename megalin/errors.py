"""Errors for users: each names what is wrong, the rule and the remedy, and sets the exit code."""

from collections.abc import Iterator


class MegalinError(ValueError):
    """Base of every error that a user can fix; the command line prints it without a traceback."""

    exit_code = 1

    def line(self) -> str:
        """The error as it is printed."""
        return f"{type(self).__name__}: {self}"


class ConfigError(MegalinError):
    """An invalid config field, command-line value or mesh."""

    exit_code = 2


class DataError(MegalinError):
    """A missing or corrupt shard, corpus or tokenizer, or one that does not fit the model."""

    exit_code = 3


class CheckpointError(MegalinError):
    """A missing or corrupt checkpoint, or one of another model."""

    exit_code = 4


class StorageError(MegalinError):
    """An unwritable run folder or file system."""

    exit_code = 5


class OperandError(MegalinError):
    """Tensors with shapes, dtypes or devices that an op does not accept."""


class RankFailedError(MegalinError):
    """A rank that raised, died, left or did not join; the message names it and includes its traceback, if any."""

    exit_code = 6


class RankStalledError(RankFailedError):
    """A rank that did not take part in a collective in time, or launched other ops than the rest; the message names
    it."""

    exit_code = 7


class NumericError(MegalinError):
    """A non-finite loss or gradient, or a loss spike beyond the number of rollbacks."""

    exit_code = 8


class KernelError(MegalinError):
    """A requested compiled kernel that cannot run."""

    exit_code = 9


class HostMemoryError(MegalinError):
    """A process without host memory; the message names the rank, its resident memory and its limits."""

    exit_code = 10


class ReplicaError(MegalinError):
    """Copies of a weight or moment on several ranks that are no longer equal."""

    exit_code = 11


class PreemptedError(MegalinError):
    """A run ended by SIGTERM or Ctrl-C before its last step, with all its steps saved: no fault."""

    exit_code = 75

    def line(self) -> str:
        """The reason of the stop."""
        return f"stopped: {self}"


REFUSALS = (ConfigError, DataError, CheckpointError)
"""Errors that refuse a run before its first step."""


def causes(error: BaseException) -> Iterator[BaseException]:
    """Yields the error and the chain of its causes (`__cause__`)."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__
