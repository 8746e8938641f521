"""Cases of tools/benchmark_ops.py: one module per op, each with `cases()`."""
