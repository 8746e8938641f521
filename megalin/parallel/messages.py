"""Values that ranks send to each other as JSON, and tensors as safetensors: received bytes are never unpickled.

The bytes travel in host memory through gloo, first their lengths and then the bytes, so the device is not waited for.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from typing import Any

import pydantic
import safetensors.torch
import torch
import torch.distributed as dist
from torch import Tensor

from megalin.parallel.heartbeats import current


def encode(value: Any, kind: Any = None) -> bytes:
    """The value as JSON.

    Args:
        kind: the type of other values than JSON's own: a named tuple, a config, `set[str]`, `Path | None`, ...

    Raises:
        TypeError: a value, part of a value or key that JSON would change or does not have, without a kind.
    """
    if kind is None:
        _check_plain(value)
        return json.dumps(value).encode()
    # Not dump_json, which writes numbers that are not finite as null.
    return json.dumps(_adapter(kind).dump_python(value, mode="json")).encode()


def decode(data: bytes, kind: Any = None) -> Any:
    """The inverse of `encode`, except that a plain tuple becomes a list. Raises ValueError for other bytes."""
    return json.loads(data) if kind is None else _adapter(kind).validate_json(data)


@functools.cache
def _adapter(kind: Any) -> pydantic.TypeAdapter[Any]:
    """Converter of values of a kind, which takes up to some milliseconds to build."""
    return pydantic.TypeAdapter(kind)


def _check_plain(value: Any) -> None:
    if type(value) in (list, tuple):
        for item in value:
            _check_plain(item)
    elif type(value) is dict:
        for key, item in value.items():
            if type(key) is not str:
                raise TypeError(f"the key {key!r} is a {type(key).__name__}; give the kind of the value")
            _check_plain(item)
    elif value is not None and type(value) not in (bool, int, float, str):
        raise TypeError(f"{value!r} is a {type(value).__name__}; give the kind of the value")


def broadcast_bytes(data: bytes | None) -> bytes:
    """Rank 0's bytes on every rank of the default group; the others pass None. Two broadcasts."""
    length = torch.tensor([0 if data is None else len(data)])
    with current().waiting("broadcast", "host", length.shape):
        dist.broadcast(length, src=0)
    message = torch.empty(int(length), dtype=torch.uint8) if data is None else _tensor(data)
    if len(message):
        with current().waiting("broadcast", "host", message.shape):
            dist.broadcast(message, src=0)
    return message.numpy().tobytes()


def gather_bytes(data: bytes, group: dist.ProcessGroup | None) -> list[bytes]:
    """Every rank's bytes, in rank order of the group (None: the default one). Two all-gathers."""
    size = dist.get_world_size(group)
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(size)]
    with current().waiting("all_gather", "host", (1,)):
        dist.all_gather(lengths, torch.tensor([len(data)]), group=group)
    longest = max(int(length) for length in lengths)
    if longest == 0:
        return [b""] * size
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[: len(data)] = _tensor(data)
    messages = [torch.empty_like(padded) for _ in range(size)]
    with current().waiting("all_gather", "host", padded.shape):
        dist.all_gather(messages, padded, group=group)
    return [message[: int(length)].numpy().tobytes() for message, length in zip(messages, lengths, strict=True)]


def gather_values(value: Any, group: dist.ProcessGroup | None, kind: Any = None) -> list[Any]:
    """Every rank's value, in rank order of the group; without a group only this process's. `kind` as in `encode`."""
    if group is None:
        return [value]
    return [decode(data, kind) for data in gather_bytes(encode(value, kind), group)]


def gather_tensors(tensors: Mapping[str, Tensor], group: dist.ProcessGroup | None) -> list[dict[str, Tensor]]:
    """Every rank's tensors by name, in host memory, in rank order of the group; without a group only this process's."""
    if group is None:
        return [dict(tensors)]
    data = safetensors.torch.save({name: tensor.contiguous() for name, tensor in tensors.items()})
    return [safetensors.torch.load(each) for each in gather_bytes(data, group)]


def _tensor(data: bytes) -> Tensor:
    """[len(data)] uint8, a copy."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
