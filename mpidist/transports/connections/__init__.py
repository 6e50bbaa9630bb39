"""Connections between two ranks, for messages at any time: `base` says what one is, `open` makes them."""
