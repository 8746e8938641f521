"""Megatron .bin/.idx token shards: reading, writing, tokenization into them, merging and inspection."""
