"""Index building and validation for token shards (csrc/cpu)."""

import numpy as np
import numpy.typing as npt

sources: str
"""sha256, in hex, of the source files that it was compiled from."""

def build_sample_index(
    lengths: npt.NDArray[np.int32], *, first_token: int, stride: int, count: int
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Positions of the samples' first tokens in the concatenated sequences.

    Sample j starts at token `first_token + j * stride`: token `offsets[j]` of the non-empty sequence `sequences[j]`.
    One pass over `lengths` [N] int32 (may be unaligned), 8 bytes of memory per sample.

    Returns:
        sequences [count] int32 and offsets [count] int32.

    Raises:
        ValueError: a negative length, or samples that do not all start inside the sequences.
        TypeError: `lengths` is not a C-contiguous int32 array.
    """

def build_blend(
    weights: npt.NDArray[np.float64], limits: npt.NDArray[np.int64], size: int
) -> tuple[npt.NDArray[np.int16], npt.NDArray[np.int64]]:
    """The source of each of `size` samples, and the sample's index in that source.

    Step i takes the source d of largest `weights[d] * max(i, 1) - taken[d]` among those with `taken[d] < limits[d]`,
    the first on ties; size x sources operations.

    Returns:
        sources [size] int16 and sample indices [size] int64.

    Raises:
        ValueError: fewer than 1 or more than 32767 sources, or fewer than `size` samples in them.
        TypeError: an array of another dtype, or not C-contiguous.
    """

def check_lengths(lengths: npt.NDArray[np.int32], pointers: npt.NDArray[np.int64], *, itemsize: int) -> tuple[int, int]:
    """Index of the first sequence with a negative length or a pointer that is not the bytes before it, and the tokens
    before it; if all are valid, the number of sequences and the sum of their lengths. One pass, no copy.

    Raises:
        ValueError: arrays that are not one-dimensional, differ in size, or have 2^31 entries or more.
        TypeError: an array of another dtype, or not C-contiguous.
    """

def check_documents(documents: npt.NDArray[np.int64]) -> int:
    """Index of the first entry below its predecessor (for the first entry: below 0); the number of entries if there is
    none. One pass, no copy."""

def count_rows(lengths: npt.NDArray[np.int32], *, capacity: int, window: int, fit: str) -> npt.NDArray[np.int64]:
    """Number of packed samples of `capacity` tokens for each window of `window` sequences, [ceil(N / window)] int64.

    A sequence of n ids takes n - 1 tokens (its last id is a label only); one that takes more than `capacity` is split
    into pieces of `capacity` and a remainder, and one of fewer than two ids takes none. Within a window pieces are
    placed largest first: with fit "first_fit" in the first sample with enough room, with "best_fit" in the fullest such
    sample. Memory: 32 bytes per piece of one window.

    Raises:
        ValueError: `capacity` or `window` out of range, an unknown `fit`, or an array that is not one-dimensional.
        TypeError: `lengths` is not a C-contiguous int32 array.
    """

def pack_window(
    lengths: npt.NDArray[np.int32], *, capacity: int, fit: str
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
    """The pieces of all packed samples of a window, as `count_rows` places them.

    Returns:
        pieces [n, 3] int32: sequence in the window, first id, tokens; sample by sample, each in order of placement. A
            piece of `size` tokens reads `size` + 1 ids.
        first_pieces [samples + 1] int64: sample r has pieces [first_pieces[r], first_pieces[r + 1]).

    Raises:
        ValueError, TypeError: as `count_rows`.
    """
