"""All knowledge of ranks: mesh, collectives, tensor-parallel layers, sharded data parallelism."""
