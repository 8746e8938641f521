"""Checkpoints: written atomically, verified before they are read."""
