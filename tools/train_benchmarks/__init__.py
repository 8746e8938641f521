"""Parts of tools/benchmark_train.py: the clock of a step, its roofline, and baselines of other libraries."""
