"""Panics of the libraries in Rust, which no `except Exception` catches, as errors of the user's file."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from megalin.errors import DataError


@contextlib.contextmanager
def panics_as_data_errors(path: Path, *, remedy: str = "use one without a pathological pattern") -> Iterator[None]:
    """Raises DataError that names `path`, a tokenizer's file, and ends with `remedy`, in place of a panic."""
    try:
        yield
    except BaseException as error:
        if type(error).__module__ == "pyo3_runtime":  # PanicException, a class of its own in each library
            raise DataError(f"{path}: its library gave up on this tokenizer: {error}; {remedy}") from None
        raise
