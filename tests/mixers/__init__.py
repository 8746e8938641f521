"""Mixers outside the package, named in a config by their dotted path."""
