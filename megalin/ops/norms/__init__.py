"""Norms, and the fused inputs of norms that are applied after a matmul."""
