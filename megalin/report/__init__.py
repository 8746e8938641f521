"""HTML report of a run, read from its folder."""
