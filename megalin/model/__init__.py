"""Blocks, the decoder language model and the presets."""
