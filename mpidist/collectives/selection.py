"""Which all-reduce to use for how many bytes: policy, in one place.

The thresholds are what `benchmarks/all_reduce.py` showed on one node; `MPIDIST_ALGORITHM` or the caller's explicit
choice always wins.  Every algorithm that may be chosen here gives the same bits on all ranks: for schedules the checker
proves it, for shared memory and MPI's own all-reduce a parallel test does.
"""

from __future__ import annotations

from dataclasses import dataclass

from mpidist.cluster.topology import Topology
from mpidist.collectives.algorithms import names

#: The all-reduces that `choose` may return, and those that it may use between nodes: all ranks get the same bits.
AUTOMATIC = ("shared_memory", "native", "recursive_doubling", "hierarchical", "ring")
BETWEEN_NODES = ("ring", "rabenseifner")

#: From this size in bytes on, moving every byte once counts more than the number of messages.
_LARGE_BYTES = 1 << 16

#: From so many nodes on the 2 (nodes - 1) messages of a ring between them cost more than they save.
_MANY_NODES = 8


@dataclass(frozen=True)
class Facts:
    """What the choice depends on.

    Attributes
    ----------
    topology : Topology
    native : tuple of str
        Collectives that the transport has of its own.
    has_segments : bool
        Whether all ranks share memory, and the buffer is the host's.
    """

    topology: Topology
    native: tuple[str, ...]
    has_segments: bool


def choose(nbytes: int, facts: Facts) -> str:
    """Return the name of the algorithm for an all-reduce of `nbytes`; the same on all ranks."""
    if facts.has_segments:
        return "shared_memory"
    topology = facts.topology
    if nbytes < _LARGE_BYTES:
        return "native" if "all_reduce" in facts.native else "recursive_doubling"
    if topology.node_count > 1 and max(topology.local_size_of) > 1:
        return "hierarchical"
    return "ring"


def between_nodes(topology: Topology) -> str:
    """Return the algorithm that a hierarchical all-reduce uses between nodes: few messages where nodes are many."""
    return "ring" if topology.node_count <= _MANY_NODES else "rabenseifner"


def check(name: str, facts: Facts) -> str:
    """Return the name of the algorithm that was asked for, if it can be used here.

    Raises
    ------
    ValueError
        There is no such algorithm, or not for these ranks and this kind of memory; the message lists those there are.
    """
    known = [*names("all_reduce"), "hierarchical"]
    known += ["shared_memory"] if facts.has_segments else []
    known += ["native"] if "all_reduce" in facts.native else []
    if name not in known:
        raise _unknown(name, known)
    return name


def check_name(name: str) -> None:
    """Raise ValueError unless there is an algorithm of this name somewhere, be it that one rank needs none."""
    known = ["auto", *names("all_reduce"), "hierarchical", "shared_memory", "native"]
    if name not in known:
        raise _unknown(name, known[1:])


def _unknown(name: str, known: list[str]) -> ValueError:
    return ValueError(f"no all_reduce algorithm is called {name!r} here; known ones: auto, {', '.join(known)}")
