"""Strategies: what each rank is, what is mirrored, and when to reduce.  One strategy a file, on the classes of `base`."""
