"""Adapters of machine-learning frameworks, each in a package of its own that is imported only when asked for."""
