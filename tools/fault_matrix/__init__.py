"""Injection of the faults of a training run: processes, files and the checks of what a user sees."""
