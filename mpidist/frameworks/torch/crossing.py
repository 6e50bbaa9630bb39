"""How often gradients have passed from replica to replica inside a backward pass.

What a rank's gradients are multiplied by when they have been computed is right only where all of them come from its own
loss.  Who weights them asks here.
"""

from __future__ import annotations

_count = 0


def note() -> None:
    """Take note of one more.  Local."""
    global _count
    _count += 1


def count() -> int:
    """Return how many there were in this process.  Local."""
    return _count
