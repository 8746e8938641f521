"""megalin: distributed pretraining of linear-complexity language models."""

__version__ = "0.1.0"
