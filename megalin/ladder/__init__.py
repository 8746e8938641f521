"""Ladders: runs of several sizes, mixers and token counts for a scaling law, planned, run and resumed."""
