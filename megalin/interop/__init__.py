"""Weights and configs of other systems."""
