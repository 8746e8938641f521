"""The optimizer and its schedule."""
