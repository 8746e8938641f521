"""Groups of sequences for one forward each, within limits of tokens and states."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

_TOKENS_AT_ONCE = 16384  # of all sequences in a forward
_STATES_BYTES = 2 << 30  # of all sequences in a forward; each has its own state, whatever its length


def forward_groups(lengths: Sequence[int], state_bytes: int) -> Iterator[range]:
    """Yields ranges of sequences of ascending `lengths` in tokens, each with a state of `state_bytes`."""
    most = max(_STATES_BYTES // max(state_bytes, 1), 1)
    first = 0
    for index, length in enumerate(lengths):
        count = index - first
        if count and (count == most or (count + 1) * max(length, 1) > _TOKENS_AT_ONCE):
            yield range(first, index)
            first = index
    if lengths:
        yield range(first, len(lengths))
