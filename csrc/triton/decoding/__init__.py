"""Triton kernels of decoding: one token of a few to hundreds of sequences."""
