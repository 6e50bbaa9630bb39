"""Ways of a bucket: through the memory of a node, between nodes, by messages, on a device; which one is taken."""
