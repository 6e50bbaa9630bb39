"""The table of collective algorithms: one line each.  Whoever needs a schedule asks here.

To add an algorithm, write its generator in this folder and add a line; checker, executor, cost, simulator and the
tests over this table pick it up.
"""

from __future__ import annotations

from mpidist.cluster.topology import Topology
from mpidist.schedules import binomial, rabenseifner, recursive_doubling, ring
from mpidist.schedules.hierarchical import compose
from mpidist.schedules.rounds import Schedule, in_turn

_TABLE = (
    Schedule("ring", "all_reduce", ring.chunks, in_turn(ring.pass_sums, ring.pass_copies)),
    Schedule("recursive_doubling", "all_reduce", recursive_doubling.chunks, recursive_doubling.rounds),
    Schedule("rabenseifner", "all_reduce", rabenseifner.chunks, rabenseifner.rounds),
    Schedule("binomial", "all_reduce", binomial.chunks, in_turn(binomial.to_root, binomial.from_root)),
    Schedule("ring", "reduce_scatter", ring.chunks, ring.pass_sums),
    Schedule("ring", "all_gather", ring.chunks, ring.pass_copies),
    Schedule("binomial", "broadcast", binomial.chunks, binomial.from_root),
    Schedule("binomial", "reduce", binomial.chunks, binomial.to_root),
)

#: Every algorithm that needs no topology, by collective and name.
ALGORITHMS: dict[tuple[str, str], Schedule] = {(schedule.collective, schedule.name): schedule for schedule in _TABLE}

#: The all-reduces that a hierarchical one may use between nodes: all ranks get the same bits.
BETWEEN_NODES = ("ring", "rabenseifner", "recursive_doubling")


def names(collective: str) -> tuple[str, ...]:
    """Return the names of the algorithms for `collective`, in the order of the table (Local)."""
    return tuple(name for known, name in ALGORITHMS if known == collective)


def algorithm(collective: str, name: str) -> Schedule:
    """Return the schedule of an algorithm (Local)."""
    try:
        return ALGORITHMS[collective, name]
    except KeyError:
        known = ", ".join(names(collective)) or "none"
        raise ValueError(f"no {collective} algorithm is called {name!r}; known ones: {known}") from None


def hierarchical(topology: Topology, inter: str | Schedule = "ring") -> Schedule:
    """Return an all-reduce made for `topology`: rings inside the nodes, `inter` between them (Local).

    Parameters
    ----------
    topology : Topology
        The schedule is for exactly these ranks.
    inter : str or Schedule
        The all-reduce between the nodes: one of ``names("all_reduce")``, or a schedule, which may be hierarchical too.
    """
    across = algorithm("all_reduce", inter) if isinstance(inter, str) else inter
    return compose(topology, algorithm("reduce_scatter", "ring"), across, algorithm("all_gather", "ring"))
