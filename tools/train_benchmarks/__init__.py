"""Parts of tools/benchmark_train.py: the clock of a step, its floor, and the same step of other libraries."""
