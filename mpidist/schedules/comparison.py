"""All the schedules that do one collective, side by side: how long each takes, and what it sends over which links."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mpidist.cluster.topology import Topology
from mpidist.schedules.cost import CostModel, traffic
from mpidist.schedules.rounds import Schedule
from mpidist.schedules.simulator import simulate
from mpidist.schedules.table import ALGORITHMS, BETWEEN_NODES, hierarchical


@dataclass(frozen=True)
class Outcome:
    """What one schedule takes."""

    algorithm: str
    rounds: int
    seconds: float  # when the last rank is done
    bytes_per_rank: float  # sent by the rank that sends most
    bytes_per_link: float  # over the link of the node that sends or receives most
    extrapolated_rounds: int = 0  # how many rounds were not played but continued at the mean pace; 0 without jitter


def candidates(collective: str, topology: Topology) -> list[Schedule]:
    """Return every schedule for a collective on these ranks: the table's, and for an all-reduce those by levels."""
    flat = [schedule for (kind, _), schedule in ALGORITHMS.items() if kind == collective]
    if collective != "all_reduce" or topology.node_count == 1 or topology.node_count == topology.size:
        return flat
    return flat + [hierarchical(topology, across) for across in BETWEEN_NODES]


def compare(
    nbytes: float,
    model: CostModel,
    topology: Topology,
    schedules: Sequence[Schedule] | None = None,
    jitter: float | None = None,
    seed: int = 0,
) -> list[Outcome]:
    """Return what each schedule takes, the fastest first (Local)."""
    schedules = candidates("all_reduce", topology) if schedules is None else schedules
    outcomes = [_outcome(schedule, nbytes, model, topology, jitter, seed) for schedule in schedules]
    return sorted(outcomes, key=lambda outcome: outcome.seconds)


def _outcome(
    schedule: Schedule, nbytes: float, model: CostModel, topology: Topology, jitter: float | None, seed: int
) -> Outcome:
    played = simulate(schedule, topology.size, nbytes, model, topology, jitter=jitter, seed=seed)
    sent = traffic(schedule, topology.size, nbytes, topology=topology)
    busiest_node = max(sent.bytes_leaving.max(), sent.bytes_entering.max())
    return Outcome(
        schedule.name,
        sent.rounds,
        played.seconds,
        float(sent.bytes_sent.max()),
        float(busiest_node) / (model.links_per_node or max(topology.local_size_of)),
        played.extrapolated_rounds,
    )
