"""Ops of decoding, one token of each sequence: few kernels a layer, with norms, gates and residual additions inside."""
