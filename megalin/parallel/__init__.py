"""All code that depends on ranks: mesh, collectives, tensor-parallel layers, sharded data parallelism."""
