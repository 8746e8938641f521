"""Local tensor ops, each with a pure-PyTorch reference and a dispatch to compiled kernels."""
