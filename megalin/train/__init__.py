"""The training loop, its step, metrics and failure handling."""
