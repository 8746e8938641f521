"""Tile choice, tensor descriptors and reductions, shared by the Triton kernels."""
