"""Triton kernels, imported only by megalin.ops: kernels, and launchers from tensors to tensors."""
