"""Norms, positions and the mixers that a block is built of."""
