"""Sweeps: many runs of one config with different overrides, several at a time, each ended once it brings nothing."""
