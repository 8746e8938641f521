"""Gates of mixers and gated linear units."""
