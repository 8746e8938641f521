"""Megatron .bin/.idx token shards: reading, writing, tokenization, merging and inspection."""
