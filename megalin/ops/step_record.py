"""Marks of a CUDA graph's progress, written by the device itself: launches that become nodes of the graph."""

from __future__ import annotations

import torch
from torch import Tensor


class DeviceMarks:
    """Marks of one graph in host memory, and the sum of a CUDA stream's waits in a replay.

    Args:
        device: a GPU.
        count: words for marks.

    Attributes:
        words: [count] int64 in pinned host memory, which the host reads at any time.
    """

    words: Tensor

    def __init__(self, device: torch.device, count: int) -> None:
        self.words = torch.zeros(count, dtype=torch.int64, pin_memory=True)
        self._state = torch.zeros(3, dtype=torch.int64, device=device)
        # Before a capture, in which no kernel can be loaded.
        self.begin_replay()
        for ends in (False, True):
            self.wait(ends=ends)
            for waits in (False, True):
                self.mark(0, waits=waits, ends=ends)
        self.reset()

    def reset(self) -> None:
        """Clears the marks of all replays; waits for the device."""
        torch.cuda.synchronize(self._state.device)
        self._state.zero_()
        self.words.zero_()

    def begin_replay(self) -> None:
        """Counts a replay and begins its sum of waits."""
        from megalin._triton import step_record as kernels

        kernels.begin(self._state)

    def mark(self, place: int, *, waits: bool, ends: bool) -> None:
        """Writes the number of the replay, from 1 on, to words[place]; with `waits` as `wait` too."""
        from megalin._triton import step_record as kernels

        kernels.mark(self._state, self.words, place, waits=waits, ends=ends)

    def wait(self, *, ends: bool) -> None:
        """Begins a wait of the current CUDA stream, or ends it."""
        from megalin._triton import step_record as kernels

        kernels.wait(self._state, ends=ends)

    def waited(self) -> Tensor:
        """Sum of the waits of the last replay, [1] int64, ns, in host memory; valid once the current CUDA stream has
        reached this call."""
        return self._state[2:].to("cpu", non_blocking=True)
