"""Triton kernels of megalin.ops.scans."""
