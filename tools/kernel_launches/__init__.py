"""Recorded launches of the Triton kernels and their compilation ahead of time."""
