"""Position encodings: LRPE, RoPE and Cosine RelPE."""
