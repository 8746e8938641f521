"""Token shards, sample order, packing and the batch loader."""
