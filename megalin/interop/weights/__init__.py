"""Interchange of weights with the folders of other systems."""
