"""Dimension along which FSDP shards a parameter."""


def shard_dim(shape: tuple[int, ...], size: int) -> int:
    """Dimension 0 if `size` divides it, else the last one that it divides, else 0 (which alone may be uneven).

    Along other dimensions than 0 FSDP copies weights to another layout when it gathers them, and gradients when it
    reduces them; dimension 0 of a fused [parts, out, in] parameter would give nothing to ranks beyond its parts.
    """
    divided = [dim for dim, length in enumerate(shape) if length % size == 0]
    return divided[-1] if divided and divided[0] > 0 else 0
