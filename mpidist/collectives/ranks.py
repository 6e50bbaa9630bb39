"""What bound collectives call the communicator that they are bound to, whose module imports theirs."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from mpidist.collectives.communicator import Communicator

#: A set of ranks, and what an all-reduce over them can be bound to.
Ranks: TypeAlias = "Communicator"
