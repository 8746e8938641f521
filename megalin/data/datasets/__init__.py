"""Training and evaluation samples out of token shards."""
