"""What tools/benchmark_ops.py measures: one module an op, each with `cases()`."""
