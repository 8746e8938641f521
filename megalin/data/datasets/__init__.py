"""Datasets of training and evaluation samples from token shards."""
