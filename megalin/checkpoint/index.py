"""The index of a checkpoint: its tensors and the file of each box of them; checked before anything is read."""

from __future__ import annotations

import math
from typing import Annotated, Literal

import pydantic
import torch

from megalin.config import Config
from megalin.errors import CheckpointError

INDEX_FILE = "index.json"
FILE_NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,199}$"

DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Safetensors names of the dtypes that a checkpoint supports."""

DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}

_DtypeName = Literal["F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U8", "BOOL"]
_Size = Annotated[int, pydantic.Field(ge=0, lt=2**48)]
_FileName = Annotated[str, pydantic.Field(pattern=FILE_NAME_PATTERN)]


class Chunk(Config):
    """A box of a tensor, stored as one entry of a safetensors file."""

    offsets: list[_Size]
    """First index in each dim of the tensor."""

    lengths: list[_Size]
    """Number of indices in each dim."""

    file: _FileName
    """Name of the file in the checkpoint's directory."""


class TensorRecord(Config):
    """A tensor of the checkpoint: its dtype, global shape and chunks."""

    dtype: _DtypeName
    """Element type, by its safetensors name."""

    shape: list[_Size]
    """Global shape."""

    chunks: list[Chunk]
    """Boxes that cover the tensor exactly once."""


class Index(Config):
    """Content of index.json."""

    format: Literal[1] = 1
    """Version of this layout."""

    tensors: dict[str, TensorRecord]
    """By global name."""


def chunk_key(name: str, record_shape: list[int], chunk: Chunk) -> str:
    """Name of a chunk's entry in its file: the tensor's, with offsets if it is a part: `embedding.weight@512,0`."""
    if chunk.lengths == record_shape:
        return name
    return f"{name}@{','.join(str(offset) for offset in chunk.offsets)}"


def parse_index(data: bytes, source: str) -> Index:
    """Parses index.json and checks that the chunks of every tensor cover it exactly once, without gap or overlap.

    Raises:
        CheckpointError: the index is invalid; the message names `source` and the field or tensors.
    """
    try:
        index = Index.model_validate_json(data)
    except pydantic.ValidationError as error:
        raise CheckpointError(f"{source}: not a checkpoint index: {first_problem(error)}") from None
    problems = [f"{name}: {problem}" for name, record in index.tensors.items() if (problem := coverage_problem(record))]
    if problems:
        raise CheckpointError(f"{source}: " + "; ".join(problems))
    return index


def first_problem(error: pydantic.ValidationError) -> str:
    """The first problem of a validation error, with the path of its field."""
    detail = error.errors()[0]
    return f"{'.'.join(str(part) for part in detail['loc']) or 'document'}: {detail['msg']}"


def coverage_problem(record: TensorRecord) -> str | None:
    """Checks that the chunks cover the tensor exactly once (bounds, overlaps, volume); the problem, or None."""
    for chunk in record.chunks:
        if len(chunk.offsets) != len(record.shape) or len(chunk.lengths) != len(record.shape):
            return f"a chunk in {chunk.file} does not have the number of dims of shape {record.shape}"
        ends = zip(chunk.offsets, chunk.lengths, record.shape, strict=True)
        if any(length == 0 or offset + length > size for offset, length, size in ends):
            return f"chunk {chunk.offsets}+{chunk.lengths} in {chunk.file} is empty or exceeds shape {record.shape}"
    volume = sum(math.prod(chunk.lengths) for chunk in record.chunks)
    total = math.prod(record.shape)
    if volume != total:
        return f"its chunks have {volume} elements, but shape {record.shape} has {total}"
    return _overlap_problem(record)


def _overlap_problem(record: TensorRecord) -> str | None:
    if len(record.chunks) < 2 or not record.shape:
        return None if len(record.chunks) < 2 else "a scalar has more than one chunk"
    dims = range(len(record.shape))
    # Sweeping along the dim with the most cuts leaves the fewest chunks to compare with each other.
    sweep = max(dims, key=lambda dim: len({chunk.offsets[dim] for chunk in record.chunks}))
    active: list[Chunk] = []
    for chunk in sorted(record.chunks, key=lambda chunk: chunk.offsets[sweep]):
        active = [other for other in active if other.offsets[sweep] + other.lengths[sweep] > chunk.offsets[sweep]]
        for other in active:
            if all(
                chunk.offsets[dim] < other.offsets[dim] + other.lengths[dim]
                and other.offsets[dim] < chunk.offsets[dim] + chunk.lengths[dim]
                for dim in dims
            ):
                return f"chunks at {other.offsets} and {chunk.offsets} overlap"
        active.append(chunk)
    return None
