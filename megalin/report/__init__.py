"""A run as one self-contained page: what its folder tells, drawn and escaped."""
