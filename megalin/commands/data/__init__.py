"""The commands of `megalin data`, one module each."""
