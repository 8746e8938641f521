"""Implementation of the Python API that `import megalin` gives: models, runs and training without the command line."""
