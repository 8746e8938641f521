"""Triton kernels, imported only by megalin.ops: `megalin._triton.X` is the file csrc/triton/X.py (by a symlink).

Each module holds kernels and their launchers, functions from tensors to tensors.
"""
