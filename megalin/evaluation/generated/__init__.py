"""Suites of generated tasks on a run: recall, state tracking, needles and a RULER-like set."""
