"""Messages of the ranks through their store, for a thread that each of them runs: no collective of training waits."""

from __future__ import annotations

import struct
import threading
import time
from typing import Any

import torch.distributed as dist

from megalin.errors import MegalinError
from megalin.parallel.agreement import decode_error, encode_error, rank, world_size
from megalin.parallel.rank_failures import default_rendezvous

_FIRST_POLL_SECONDS, _LAST_POLL_SECONDS = 0.005, 0.5
_ABORTED = "aborted"


class StoreChannel:
    """A channel of `on_rank_zero` and `on_every_rank` for one thread of each rank, with a connection of its own.

    Every rank creates it and then sends the same messages in the same order. A wait for another rank has no limit: that
    rank watches its own thread by `idle_seconds`, and calls `abort` where it makes no progress.

    Args:
        name: of the channel's keys in the store.

    Attributes:
        waits: True while the thread waits for other ranks.
    """

    def __init__(self, name: str) -> None:
        self._rank, self._world_size = rank(), world_size()
        self._number, self._old_keys = 0, list[str]()
        self._closed = threading.Event()
        self._last_beat = time.monotonic()
        self.waits = False
        if self._world_size > 1:
            store = default_rendezvous().store.clone()
            # Later channels of this process group have keys of their own.
            number = store.add(f"{name}/{self._rank}", 1)
            self._store: Any = dist.PrefixStore(f"{name}.{number}", store)  # type: ignore[attr-defined]

    @property
    def idle_seconds(self) -> float:
        """Time in which the thread made no progress; 0 while it waits for other ranks."""
        return 0.0 if self.waits else time.monotonic() - self._last_beat

    def beat(self) -> None:
        """Records progress of the thread."""
        self._last_beat = time.monotonic()

    def broadcast(self, data: bytes | None) -> bytes:
        """Rank 0's bytes on every rank; the others pass None.

        Raises:
            MegalinError: the error with which a rank called `abort`.
        """
        key = self._next_key()
        if data is None:
            return self._receive([key])[0]
        if self._world_size > 1:
            self._store.set(key, data)
            self._old_keys.append(key)
        return data

    def gather(self, data: bytes) -> list[bytes]:
        """Every rank's bytes, by rank. Raises as `broadcast` does."""
        if self._world_size == 1:
            return [data]
        key = self._next_key()
        keys = [f"{key}/{other}" for other in range(self._world_size)]
        self._store.set(keys[self._rank], data)
        if self._rank > 0:
            return _split(self._receive([key])[0], self._world_size)
        gathered = self._receive(keys)
        self._store.set(key, struct.pack(f"<{len(gathered)}Q", *map(len, gathered)) + b"".join(gathered))
        for old in self._old_keys:  # of messages that every rank had received before it sent this one
            self._store.delete_key(old)
        self._old_keys = [*keys, key]
        return gathered

    def abort(self, error: MegalinError) -> None:
        """Makes every wait in this channel, of any rank, raise the error; any thread may call it."""
        if self._world_size > 1:
            self._store.set(_ABORTED, encode_error(error))

    def close(self) -> None:
        """Ends a wait of this rank's thread."""
        self._closed.set()

    def _next_key(self) -> str:
        self._number += 1
        return f"{self._number}"

    def _receive(self, keys: list[str]) -> list[bytes]:
        self.waits, pause = True, _FIRST_POLL_SECONDS
        # Polling, as a wait of the store that reaches its limit prints warnings.
        while not self._store.check(keys):
            if self._store.check([_ABORTED]):
                raise decode_error(self._store.get(_ABORTED))
            if self._closed.wait(pause):
                raise MegalinError(f"rank {self._rank} left before all ranks had finished")
            pause = min(2 * pause, _LAST_POLL_SECONDS)
        received = [self._store.get(key) for key in keys]
        self.beat()
        self.waits = False
        return received


def _split(data: bytes, count: int) -> list[bytes]:
    lengths, messages, position = struct.unpack_from(f"<{count}Q", data), [], 8 * count
    for length in lengths:
        messages.append(data[position : position + length])
        position += length
    return messages
