"""Heartbeats of a host's ranks: each rank's phase, step and last launched ops, in memory that all of them map.

The file holds a header, and for each rank a slot of 64 bytes, a note of the error with which it leaves, and a ring of
the last ops that it launched, which other processes read while the rank runs, hangs, or after it died. A rank writes
its own, without a lock: a reader may see a slot or an op half written, and decides nothing from one reading.

A process is one rank and has one heartbeat, as it has one default process group: `current()`. It lies in the process's
own memory until it moves to the shared one.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import stat
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Final, Literal, NamedTuple, get_args

from megalin.errors import StorageError
from megalin.parallel.observers import CollectiveObserver

CAPACITY = 4096
"""Launches that a rank's ring keeps. A micro-batch of 30 layers with four overlapped matmuls each makes 240."""
VARIABLE: Final = "MEGALIN_HEARTBEATS"
"""Environment variable with the path of the file that a launcher created for its ranks."""

Phase = Literal["none", "start", "first step", "step", "capture", "evaluation", "tasks", "save", "end", "rollback"]
"""Work of a rank. none: the rank has not opened the file."""
State = Literal["absent", "computing", "waiting", "reading", "done", "failed", "blocked"]
"""absent: the rank has not opened the file. waiting: in a collective, for other ranks. reading: waits for its samples.
blocked: waits in a collective of a library, which its note names.
done, failed: the rank left its run, without or with an error."""

_PHASES: tuple[Phase, ...] = get_args(Phase)
_STATES: tuple[State, ...] = get_args(State)
_WAITING, _COMPUTING, _BLOCKED = (_STATES.index(state) for state in ("waiting", "computing", "blocked"))
_MAGIC = b"MEGALIN1"
_NAME = "megalin-heartbeats-"
_HEADER = struct.Struct("<8sII")
_SLOT = struct.Struct("<qqqqdBBBxi")  # start of the process, pid, step, sequence, seconds, phase, state, verdict, rank
_SLOT_CHANGES, _CHANGES_PLACE = struct.Struct("<qqdBB"), 16
_OP = struct.Struct("<QQQB35s12s7q")  # sequence, number on the axis, step; then phase + dimensions, op, axis, shape
_OP_HEAD, _OP_TAIL = struct.Struct("<QQQ"), struct.Struct("<B35s12s7q")
_STATE_PLACE = 41
_VERDICT, _VERDICT_PLACE = struct.Struct("<Bxi"), 42
_SLOT_BYTES, _NOTE_BYTES, _OP_BYTES, _MOST_DIMS = 64, 1024, 128, 7
_RING_BYTES = CAPACITY * _OP_BYTES


class RankSlot(NamedTuple):
    """The state of a rank when it last wrote its slot."""

    rank: int
    pid: int
    """Process id on the host of the file; 0 before the rank has opened it."""
    phase: Phase
    step: int
    """The step that the rank is in, counted from 1; 0 before the first one."""
    sequence: int
    """Ops that the rank has launched."""
    seconds: float
    """Time of the last change, as `time.monotonic()` on that host."""
    state: State
    started: int
    """Start of the process, in clock ticks since the host's start, as in /proc; another process with this pid has
    another one."""
    verdict: int = 0
    """Exit code with which this rank ends the run because of another rank or itself; 0 while it goes on."""
    accused: int = 0
    """The rank that caused it."""


class LaunchedOp(NamedTuple):
    """A launch of a collective, an overlapped op or a compiled block on a rank's host."""

    sequence: int
    """Launches of the rank before it."""
    op: str
    """At most 35 bytes."""
    axis: str
    """At most 12 bytes."""
    shape: tuple[int, ...]
    """The first seven dimensions."""
    step: int
    """The step of the run; 0 before the first one."""
    phase: Phase
    number: int
    """Launches of the rank before it on the same axis."""


class Heartbeat:
    """Writer of a rank's slot and ring, which start in the phase "start", without launches.

    Attributes:
        wait_seconds: time in collectives and in reading of samples so far.
        measure_wait: measures the wait of a GPU's compute stream that its body launches, where a run does so.
        observer: observes the collectives that are launched; None: nothing does.
        pending: the collective in which the device says that it waits for other ranks, or empty; for any thread.
    """

    measure_wait: Callable[[], AbstractContextManager[None]]
    observer: CollectiveObserver | None
    pending: Callable[[], str]

    def __init__(self) -> None:
        self._buffer: bytearray | mmap.mmap = bytearray(_SLOT_BYTES + _NOTE_BYTES + _RING_BYTES)
        self._slot, self._note, self._ring = 0, _SLOT_BYTES, _SLOT_BYTES + _NOTE_BYTES
        self._changes = _CHANGES_PLACE
        self._phase, self._state, self._step = _PHASES.index("start"), _COMPUTING, 0
        self._sequence = 0
        self._numbers: Counter[str] = Counter()
        self._tails: dict[tuple[object, ...], bytes] = {}
        self._waiting_since = 0.0
        self.wait_seconds = 0.0
        self.measure_wait = nullcontext
        self.observer, self.pending = None, str
        self._write()

    def move_to(self, file: HeartbeatFile, rank: int) -> None:
        """Writes into the file from now on, as this rank; the ring moves there."""
        buffer, slot, note, ring = file.mapped, *file.places(rank)
        used = min(self._sequence, CAPACITY) * _OP_BYTES
        buffer[ring : ring + used] = self._buffer[self._ring : self._ring + used]
        self._buffer, self._slot, self._note, self._ring = buffer, slot, note, ring
        self._changes = slot + _CHANGES_PLACE
        self._phase, self._state = _PHASES.index("start"), _COMPUTING
        _SLOT.pack_into(buffer, slot, start_ticks(os.getpid()), os.getpid(), 0, 0, 0.0, 0, 0, 0, 0)
        self._write()

    @property
    def step(self) -> int:
        """The step of the run; 0 before the first one."""
        return self._step

    @step.setter
    def step(self, step: int) -> None:
        self._step = step
        self._write()

    @property
    def phase(self) -> Phase:
        """Work of this rank."""
        return _PHASES[self._phase]

    def enter(self, phase: Phase) -> None:
        """Sets the phase."""
        self._phase = _PHASES.index(phase)
        self._write()

    @contextmanager
    def in_phase(self, phase: Phase) -> Iterator[None]:
        """Sets the phase for the body; the one before it returns only where the body does not raise."""
        before = self.phase
        self.enter(phase)
        yield
        self.enter(before)

    def beat(self) -> None:
        """Records progress that is no launch."""
        self._write()

    def end(self, error: str | None = None) -> None:
        """Records that this rank leaves its run: done, or failed with an error in its phase."""
        self._state = _STATES.index("done" if error is None else "failed")
        if error is None:
            self._phase = _PHASES.index("end")
        else:
            self._write_note(error)
        self._write()

    def set_blocked(self, call: str, seconds: float) -> None:
        """Records, from another thread, that the main thread waits in a collective of a library, until its next change;
        that it waits in none, where `call` is empty. Does nothing after another change than the one at `seconds`."""
        if self._state == _COMPUTING and self._seconds == seconds:
            self._write_note(call)
            self._buffer[self._slot + _STATE_PLACE] = _BLOCKED if call else _COMPUTING

    def accuse(self, verdict: int, rank: int) -> None:
        """Records that this rank ends the run with an exit code because of a rank, for the others to do the same."""
        _VERDICT.pack_into(self._buffer, self._slot + _VERDICT_PLACE, verdict, rank)

    def record(self, op: str, axis: str, shape: Sequence[int]) -> None:
        """Adds a launch to the ring, in place of the oldest one."""
        key = op, axis, self._phase, *shape
        if (tail := self._tails.get(key)) is None:
            tail = self._tails[key] = _pack_tail(op, axis, self._phase, shape)
        number = self._numbers[axis]
        self._numbers[axis] = number + 1
        place = self._ring + self._sequence % CAPACITY * _OP_BYTES
        self._buffer[place : place + _OP_BYTES] = _OP_HEAD.pack(self._sequence, number, self._step) + tail
        self._sequence += 1
        self._write()

    def start_wait(self, op: str, axis: str, shape: Sequence[int]) -> None:
        """Adds a launch in which this rank waits for others until `end_wait`."""
        self._state = _WAITING
        self.record(op, axis, shape)
        self._waiting_since = self._seconds

    def end_wait(self) -> None:
        """Records that the wait is over."""
        self._state = _COMPUTING
        self._write()
        self.wait_seconds += self._seconds - self._waiting_since

    @contextmanager
    def waiting(self, op: str, axis: str, shape: Sequence[int] = ()) -> Iterator[None]:
        """Records a collective of the body. A rank whose collective fails stays in it."""
        self.start_wait(op, axis, shape)
        yield
        self.end_wait()

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Records that this rank waits for its samples in the body."""
        self._state = _STATES.index("reading")
        self._write()
        self._waiting_since = self._seconds
        try:
            yield
        finally:
            self.end_wait()

    def count(self, axis: str) -> int:
        """Number of launches on an axis so far."""
        return self._numbers[axis]

    def recent(self) -> list[LaunchedOp]:
        """The launches in the ring, the oldest first."""
        return _read_ring(self._buffer, self._ring)

    def _write_note(self, text: str) -> None:
        self._buffer[self._note : self._note + _NOTE_BYTES] = text.encode()[:_NOTE_BYTES].ljust(_NOTE_BYTES, b"\0")

    def _write(self) -> None:
        self._seconds = seconds = time.monotonic()
        _SLOT_CHANGES.pack_into(
            self._buffer, self._changes, self._step, self._sequence, seconds, self._phase, self._state
        )


class HeartbeatFile:
    """The mapped file of all ranks: `HeartbeatFile.create` in one process, then `HeartbeatFile.open` in the others.

    The file lies in memory, its pages are reserved when it is created, and it keeps its size: a process that writes to
    a mapped page dies of SIGBUS where a disk or memory that is full by then cannot hold it, or where the file has
    become shorter.

    Attributes:
        path: of the file in /proc, which is there until `close` or the end of the process that created it.
        name: in memory, which no other file of this host has.
        mapped: the content.
    """

    def __init__(self, path: Path, name: str, mapped: mmap.mmap, world_size: int, descriptor: int | None) -> None:
        self.path, self.name, self.world_size, self.mapped = path, name, world_size, mapped
        self._descriptor = descriptor

    @classmethod
    def create(cls, world_size: int, ranks: Sequence[int] | None = None) -> HeartbeatFile:
        """Creates the file of `world_size` ranks, of which `ranks` write into it; None: all.

        Raises:
            StorageError: there is no memory for it.
        """
        name, size = f"{_NAME}{os.urandom(8).hex()}", _file_bytes(world_size)
        parts = [(0, _head_bytes(world_size))]
        parts += [(_ring_place(world_size, rank), _RING_BYTES) for rank in ranks or range(world_size)]
        try:
            descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            try:
                os.ftruncate(descriptor, size)
                fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
                for place, length in parts:
                    os.posix_fallocate(descriptor, place, length)
                os.pwrite(descriptor, _HEADER.pack(_MAGIC, world_size, CAPACITY), 0)
                mapped = mmap.mmap(descriptor, size)
            except BaseException:
                os.close(descriptor)
                raise
        except OSError as error:
            kib = sum(length for _, length in parts) >> 10
            raise StorageError(f"cannot reserve {kib} KiB of memory for heartbeats: {error}; free memory") from None
        return cls(Path(f"/proc/{os.getpid()}/fd/{descriptor}"), name, mapped, world_size, descriptor)

    @classmethod
    def open(cls, path: str | Path, *, writable: bool = True) -> HeartbeatFile:
        """Maps a file that another process has created, or reads a copy of one.

        Raises:
            StorageError: it cannot be opened, or is not a file of heartbeats.
        """
        try:
            descriptor = os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise StorageError(f"cannot open the heartbeats {path}: {error}; start the run again") from None
        try:
            about = os.fstat(descriptor)
            head = os.pread(descriptor, _HEADER.size, 0) if stat.S_ISREG(about.st_mode) else b""
            magic, world_size, capacity = _HEADER.unpack(head) if len(head) == _HEADER.size else (b"", 0, 0)
            if magic != _MAGIC or capacity != CAPACITY or about.st_size != _file_bytes(world_size):
                raise StorageError(f"{path} is not a heartbeat file of this version; remove it and start the run again")
            access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
            return cls(Path(path), "", mmap.mmap(descriptor, about.st_size, access=access), world_size, None)
        finally:
            os.close(descriptor)

    def close(self) -> None:
        """Removes the path of a file that this process has created; what is mapped stays."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def slots(self) -> list[RankSlot]:
        """The slots of all ranks."""
        found = []
        for rank in range(self.world_size):
            started, pid, step, sequence, seconds, phase, state, *verdict = _SLOT.unpack_from(
                self.mapped, self.places(rank)[0]
            )
            phase_name: Phase = _PHASES[phase] if phase < len(_PHASES) else "none"
            state_name: State = _STATES[state] if state < len(_STATES) else "absent"
            found.append(RankSlot(rank, pid, phase_name, step, sequence, seconds, state_name, started, *verdict))
        return found

    def written(self) -> list[tuple[int, bytes]]:
        """Place and content of the header with all slots and notes, and of the rings of the ranks that have opened the
        file."""
        parts = [(0, _head_bytes(self.world_size))]
        parts += [(self.places(slot.rank)[2], _RING_BYTES) for slot in self.slots() if slot.pid]
        return [(place, self.mapped[place : place + length]) for place, length in parts]

    def ring(self, rank: int) -> list[LaunchedOp]:
        """The last launches of a rank, the oldest first."""
        return _read_ring(self.mapped, self.places(rank)[2])

    def note(self, rank: int) -> str:
        """The error with which a rank left, or the call in which it is blocked; else empty."""
        place = self.places(rank)[1]
        return self.mapped[place : place + _NOTE_BYTES].rstrip(b"\0").decode(errors="replace")

    def places(self, rank: int) -> tuple[int, int, int]:
        """Places of a rank's slot, note and ring in the mapped memory."""
        assert 0 <= rank < self.world_size, (rank, self.world_size)
        notes = _SLOT_BYTES * (1 + self.world_size)
        return _SLOT_BYTES * (1 + rank), notes + _NOTE_BYTES * rank, _ring_place(self.world_size, rank)


def start_ticks(pid: int) -> int:
    """Start of a process in clock ticks since the host's start; 0 where it does not exist or the host has no /proc."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    return int(text.rpartition(")")[2].split()[19])


def current() -> Heartbeat:
    """The heartbeat of this process."""
    return _current


def _read_ring(buffer: bytearray | mmap.mmap, place: int) -> list[LaunchedOp]:
    found = []
    for index in range(CAPACITY):
        sequence, number, step, about, op, axis, *shape = _OP.unpack_from(buffer, place + index * _OP_BYTES)
        phase, dims = about >> 3, about & _MOST_DIMS
        if op.strip(b"\0") and phase < len(_PHASES) and sequence % CAPACITY == index:
            name, axis_name = (each.rstrip(b"\0").decode(errors="replace") for each in (op, axis))
            found.append(LaunchedOp(sequence, name, axis_name, tuple(shape[:dims]), step, _PHASES[phase], number))
    return sorted(found)


def _pack_tail(op: str, axis: str, phase: int, shape: Sequence[int]) -> bytes:
    sizes = [int(size) for size in shape[:_MOST_DIMS]]
    about = phase << 3 | len(sizes)
    return _OP_TAIL.pack(about, op.encode()[:35], axis.encode()[:12], *sizes, *[0] * (_MOST_DIMS - len(sizes)))


def _head_bytes(world_size: int) -> int:
    """Bytes of the header, the slots and the notes, in whole pages."""
    head = _SLOT_BYTES * (1 + world_size) + _NOTE_BYTES * world_size
    return head + -head % mmap.PAGESIZE


def _ring_place(world_size: int, rank: int) -> int:
    return _head_bytes(world_size) + rank * _RING_BYTES


def _file_bytes(world_size: int) -> int:
    return _ring_place(world_size, world_size)


_current = Heartbeat()
