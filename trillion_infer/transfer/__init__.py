"""Moving KV between meshes, processes and tiers."""
