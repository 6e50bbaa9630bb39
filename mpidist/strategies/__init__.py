"""Strategies: what each rank is, what is mirrored, and when to reduce; one a file, on the classes of `base`."""
