"""Triton kernels of megalin.ops.positions."""
