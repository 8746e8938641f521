"""Index building and checking for token shards (csrc/cpu)."""

import numpy as np
import numpy.typing as npt

def build_sample_index(
    lengths: npt.NDArray[np.int32], *, first_token: int, stride: int, count: int
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Where samples start in sequences laid end to end.

    Sample j starts at token `first_token + j * stride`; it lies `offsets[j]` tokens into sequence `sequences[j]`, which
    is never an empty one. One pass over `lengths` [N] int32 (may be unaligned), 8 bytes of memory a sample.

    Returns:
        sequences [count] int32 and offsets [count] int32.

    Raises:
        ValueError: a negative length, or samples that do not all start inside the sequences.
        TypeError: `lengths` is not a C-contiguous int32 array.
    """

def build_blend(
    weights: npt.NDArray[np.float64], limits: npt.NDArray[np.int64], size: int
) -> tuple[npt.NDArray[np.int16], npt.NDArray[np.int64]]:
    """Which source gives each of `size` samples, and which of its own samples it is.

    Step i takes the source d of largest `weights[d] * max(i, 1) - taken[d]` among those with `taken[d] < limits[d]`,
    the first on ties; size x sources operations.

    Returns:
        sources [size] int16 and their samples [size] int64.

    Raises:
        ValueError: not 1 to 32767 sources, or fewer samples in them than `size`.
        TypeError: an array of another dtype, or not C-contiguous.
    """

def check_lengths(lengths: npt.NDArray[np.int32], pointers: npt.NDArray[np.int64], *, itemsize: int) -> tuple[int, int]:
    """The first sequence whose length is negative or whose pointer is not the bytes before it; the tokens before it.

    Where all are right: the number of sequences and the sum of their lengths. One pass, no copy.

    Raises:
        ValueError: arrays that are not one-dimensional, of another size each, or of 2^31 entries and more.
        TypeError: an array of another dtype, or not C-contiguous.
    """

def check_documents(documents: npt.NDArray[np.int64]) -> int:
    """The first entry below the one before it (the first: below 0), or the number of entries. One pass, no copy."""

def count_rows(lengths: npt.NDArray[np.int32], *, capacity: int, window: int, fit: str) -> npt.NDArray[np.int64]:
    """Rows of `capacity` tokens that each window of `window` sequences takes, [ceil(N / window)] int64.

    A sequence of n ids takes n - 1 tokens (its last id is a label only); one that takes more than `capacity` is cut
    into pieces of `capacity` and a rest, and one of fewer than two ids takes none. Within a window the largest piece is
    placed first: with fit "first_fit" in the first row with room for it, with "best_fit" in the one with the least.
    Memory: 32 bytes a piece of one window.

    Raises:
        ValueError: `capacity` or `window` out of range, another `fit`, or no one-dimensional array.
        TypeError: `lengths` is not a C-contiguous int32 array.
    """

def pieces_of_row(lengths: npt.NDArray[np.int32], *, capacity: int, fit: str, row: int) -> npt.NDArray[np.int32]:
    """What `row` of a window holds, [pieces, 3] int32: sequence of the window, its first id, and tokens taken.

    A piece of `size` tokens reads `size` + 1 ids. Raises as `count_rows` does.
    """
