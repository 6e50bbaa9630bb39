"""Who else reduces gradients and serves parameters: the only modules that import them."""
