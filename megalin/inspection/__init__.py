"""Inspection of a run's recurrences: decays, receptive fields, lower bounds and gates on held-out tokens."""
