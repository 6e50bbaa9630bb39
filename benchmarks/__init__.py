"""Benchmarks of mpidist from a checkout: this project's own cases, its peers, and pairs of checkouts."""
