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
