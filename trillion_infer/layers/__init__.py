"""Building blocks of decoders, in flax.nnx. Every block runs on one shard of the mesh (inside shard_map)."""
