"""Linear recurrences S_t = A_t S_{t-1} + k_t v_t^T in chunks, and the two-phase scans of a sharded sequence."""
