"""Triton kernels of megalin.ops.norms."""
