"""Index building for token shards (csrc/cpu/index.cpp)."""

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
