"""Record of the overlapped ops that a rank launches, and its comparison over the ranks of an axis.

Overlapped ops of all ranks share memory and signals that no collective guards: where ranks launch different ops, or the
same ones in another order, an op reads the data of another, without an error. Each rank therefore records its launches
on the host (`heartbeats.Heartbeat`), and the ranks compare them through the store in which they met; the device is not
waited for.
"""

from __future__ import annotations

import json
import zlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any, NoReturn

import torch.distributed as dist

from megalin.errors import RankStalledError
from megalin.parallel.collectives import COLLECTIVE_TIMEOUT
from megalin.parallel.heartbeats import Heartbeat, LaunchedOp
from megalin.parallel.rank_failures import default_rendezvous

REMEDY = (
    "run the same code, torch and Triton on every rank, with one inductor cache for all (TORCHINDUCTOR_CACHE_DIR, "
    'emptied once), or use parallel.tp_overlap = "none"'
)
"""End of the error message of ranks that launched different ops."""


class LaunchOrder:
    """Launches on one axis whose ranks must launch the same ops, of the same shapes, in the same order.

    Args:
        launches: this rank's ring.
        axis: name of the axis.
        group: its process group; None: this rank alone, which has nothing to compare.
        timeout: longest time that a rank waits for the launches of another.
    """

    def __init__(
        self,
        launches: Heartbeat,
        axis: str,
        group: dist.ProcessGroup | None = None,
        *,
        timeout: timedelta = COLLECTIVE_TIMEOUT,
    ) -> None:
        self._launches, self._axis, self._timeout = launches, axis, timeout
        self._digest = 0
        self._count = 0
        self._ranks: list[int] = []
        self._comparisons = 0
        if group is not None and group.size() > 1:
            self._ranks = dist.get_process_group_ranks(group)
            self._rank = dist.get_rank()
            # Later orders of the same group, which every rank creates in turn, have keys of their own.
            store = default_rendezvous().store
            number = store.add(f"launches/{group.group_name}/{self._rank}", 1)
            self._store = dist.PrefixStore(f"launches/{group.group_name}.{number}", store)  # type: ignore[attr-defined]

    def record(self, op: str, shape: tuple[int, ...]) -> None:
        """Records a launch on this axis."""
        self._launches.record(op, self._axis, shape)
        self._count += 1
        self._digest = zlib.crc32(f"{op}{shape}".encode(), self._digest)

    def residual(self) -> int:
        """A number whose sum over all ranks of the run is 0 where the ranks of every axis recorded the same launches,
        and differs from 0 where they did not, except if 32-bit hashes collide."""
        if not self._ranks:
            return 0
        first = self._ranks[0]
        weight = len(self._ranks) - 1 if self._rank == first else -1
        return weight * (first + 1) * self._digest

    def compare(self, action: str = "compares its launches") -> None:
        """Compares the launches of all ranks of the axis; a collective on the host.

        Args:
            action: the reason of this rank, which must be that of every other one.

        Raises:
            RankStalledError: on every rank of the axis where their launches or reasons differ; on the ranks that
                compare, where another one does not in time.
        """
        if not self._ranks:
            return
        number = self._comparisons
        self._comparisons += 1
        posts = self._gather(f"{number}", json.dumps([action, self._count, self._digest]), action)
        if len(set(posts)) > 1:
            own = [launch for launch in self._launches.recent() if launch.axis == self._axis]
            every = self._gather(f"{number}.launches", json.dumps(own), action)
            actions = [json.loads(post)[0] for post in posts]
            self._raise_mismatch(actions, [[_read(values) for values in json.loads(post)] for post in every])

    def _gather(self, key: str, own: str, action: str) -> list[str]:
        """Every rank's text. Raises RankStalledError that names the ranks without one."""
        self._store.set(f"{key}/{self._rank}", own)
        keys = [f"{key}/{rank}" for rank in self._ranks]
        try:
            self._store.wait(keys, self._timeout)
        except RuntimeError as error:  # a lost store fails again in the next line
            missing = [rank for rank, each in zip(self._ranks, keys, strict=True) if not self._store.check([each])]
            if missing:
                last = next((launch for launch in reversed(self._launches.recent()) if launch.axis == self._axis), None)
                raise RankStalledError(
                    f"rank {self._rank} {action} after {_describe(last)}, but {_names(missing)} did not within "
                    f"{self._timeout.total_seconds():g} s: the ranks of axis {self._axis} must launch the same "
                    f"overlapped ops in the same order; {REMEDY}"
                ) from error
        return [self._store.get(each).decode() for each in keys]

    def _raise_mismatch(self, actions: Sequence[str], launches: Sequence[Sequence[LaunchedOp]]) -> NoReturn:
        """Raises RankStalledError that names the first difference.

        Args:
            actions: by rank.
            launches: by rank, those in the ring, the oldest first.
        """
        start = max(each[0].number if each else 0 for each in launches)
        end = max(each[-1].number + 1 if each else 0 for each in launches)
        by_number = [{launch.number: launch for launch in each} for each in launches]
        where = f"before launch {start}, the oldest that every rank still records"
        for number in range(start, end):
            found = [each.get(number) for each in by_number]
            if len({None if launch is None else launch[1:4] for launch in found}) > 1:
                where = f"first at launch {number}: {self._by_rank(map(_describe, found))}"
                break
        doing = f" ({self._by_rank(actions)})" if len(set(actions)) > 1 else ""
        raise RankStalledError(
            f"the ranks of axis {self._axis} launched different overlapped ops, {where}{doing}; the ranks of an axis "
            "must launch the same ones in the same order, else they overwrite each other's data, and the results of "
            f"this step are wrong; {REMEDY}"
        )

    def _by_rank(self, texts: Iterable[str]) -> str:
        """Every rank's text, ranks with the same text together."""
        ranks: defaultdict[str, list[int]] = defaultdict(list)
        for rank, text in zip(self._ranks, texts, strict=True):
            ranks[text].append(rank)
        return "; ".join(f"{_names(own)}: {text}" for text, own in ranks.items())


def _read(values: list[Any]) -> LaunchedOp:
    """A launch from the values in its JSON."""
    sequence, op, axis, shape, *rest = values
    return LaunchedOp(sequence, op, axis, tuple(shape), *rest)


def _describe(launch: LaunchedOp | None) -> str:
    return "nothing" if launch is None else f"{launch.op} {list(launch.shape)} in step {launch.step}"


def _names(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
