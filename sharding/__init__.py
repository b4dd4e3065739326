"""Meshes, sharding rules, KV layouts and device topologies. Knows nothing of the inference library."""
