"""Triton kernels of megalin.ops.gates."""
