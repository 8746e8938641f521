"""Mixers, one module per `type` of a sub-layer in the config."""
