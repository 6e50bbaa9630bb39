"""Who is who in a job with parameter servers: which ranks train, which hold variables, which one evaluates.

All Local, and the same on all ranks: a function of the number of ranks, their hosts, and what the user said.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from mpidist.cluster.allocation import component_count, het_group_option
from mpidist.cluster.hostlist import expand_hostlist, short_host
from mpidist.cluster.roles import number_roles, parse_roles
from mpidist.cluster.spec import ClusterSpec, Task
from mpidist.cluster.topology import Topology
from mpidist.errors import counted

#: How many ranks make a worker: so many, or those of a node.
RanksPerWorker = int | str


@dataclass(frozen=True)
class Roles:
    """The task of every rank of a job with parameter servers."""

    tasks: tuple[Task, ...]  # by world rank.  The ranks of one worker have the same task
    trainers: tuple[tuple[int, ...], ...]  # by the number of the trainer: its world ranks
    source: str = ""  # where the roles come from, for messages

    @property
    def servers(self) -> tuple[int, ...]:
        """The world ranks of the servers, in the order of their numbers."""
        return self._ranks_of("ps")

    @property
    def chief(self) -> int | None:
        """The world rank whose job is chief; None where there is none, and worker 0 is the first among equals."""
        return next(iter(self._ranks_of("chief")), None)

    @property
    def evaluator(self) -> int | None:
        """The world rank of the evaluator; None where there is none."""
        return next(iter(self._ranks_of("evaluator")), None)

    def number_of(self, rank: int) -> int | None:
        """Return the number of the trainer that a world rank belongs to; None for servers and the evaluator."""
        return next((number for number, ranks in enumerate(self.trainers) if rank in ranks), None)

    def cluster_spec(self, hosts: Sequence[str]) -> ClusterSpec:
        """Return the cluster, with the address ``host:rank`` of the first rank of each task."""
        jobs: dict[str, dict[int, str]] = {}
        for rank, task in enumerate(self.tasks):
            jobs.setdefault(task.type, {}).setdefault(task.index, f"{hosts[rank]}:{rank}")
        return ClusterSpec(jobs)

    def table(self, hosts: Sequence[str]) -> str:
        """Return who is who, a line for each run of ranks with the same job on the same host."""
        rows = []
        ranks = range(len(self.tasks))
        for (job, host), run in groupby(ranks, key=lambda rank: (self.tasks[rank].type, hosts[rank])):
            members = list(run)
            first, last = self.tasks[members[0]].index, self.tasks[members[-1]].index
            of = f", {self._ranks_each(members)}" if len(members) > last - first + 1 else ""
            rows.append((_range("rank", members[0], members[-1]), _named(job, first, last) + of, host))
        widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
        lines = [f"  {row[0]:{widths[0]}}  {row[1]:{widths[1]}}  {row[2]}" for row in rows]
        return "\n".join([f"roles of {counted(len(self.tasks), 'rank')} ({self.source}):", *lines])

    def _ranks_each(self, members: Sequence[int]) -> str:
        sizes = {len(ranks) for ranks in self.trainers if set(ranks) & set(members)}
        return f"{'-'.join(map(str, sorted({min(sizes), max(sizes)})))} ranks each"

    def _ranks_of(self, job: str) -> tuple[int, ...]:
        found = [rank for rank, task in enumerate(self.tasks) if task.type == job]
        return tuple(sorted(found, key=lambda rank: self.tasks[rank].index))


def alone() -> Roles:
    """Return the role of a process without others: a worker that keeps its variables itself."""
    return Roles((Task("worker", 0),), ((0,),), "one rank, which keeps the variables itself")


def choose(
    topology: Topology,
    *,
    num_ps: int | None = None,
    text: str = "",
    ranks_per_worker: RanksPerWorker = 1,
    environ: Mapping[str, str] | None = None,
) -> Roles:
    """Return the roles of the ranks of a world: from a text, else a Slurm job's components, else by number or node.

    `num_ps`: how many servers; by default one for each node.  `text`: such as ``"chief:1,worker:*,ps:2"``; empty if
    nobody gave one.  `environ`: where Slurm's variables are; nowhere by default.  ValueError: there is no such split of
    these ranks; the message has one that there is.
    """
    _check_ranks_per_worker(ranks_per_worker)
    if num_ps is not None and (num_ps < 1 or num_ps != math.floor(num_ps)):
        raise ValueError(f"There must be at least one ps, and a whole number of them. Received: num_ps={num_ps}")
    if text:
        tasks, source = parse_roles(text, topology.size), f"MPIDIST_ROLES={text}"
        _check_num_ps(tasks, num_ps, source, ranks_per_worker)
        return deal(tasks, topology, ranks_per_worker, source)
    if topology.size == 1:
        return alone()
    components = component_of_rank(topology, environ or {})
    if len(set(components)) > 1:
        tasks, source = number_roles(_by_component(components)), "components of the Slurm job"
        _check_num_ps(tasks, num_ps, "the last component of the Slurm job", ranks_per_worker)
        return deal(tasks, topology, ranks_per_worker, source)
    source = ("one ps a node" if num_ps is None else f"num_ps={num_ps}") + _left_out(components, environ or {})
    count = min(topology.node_count, topology.size - 1) if num_ps is None else num_ps
    return deal(number_roles(_by_number(topology, count, ranks_per_worker)), topology, ranks_per_worker, source)


def deal(tasks: Sequence[Task], topology: Topology, ranks_per_worker: RanksPerWorker, source: str) -> Roles:
    """Return the roles of ranks whose jobs are known: ranks that are workers are put together to larger ones."""
    _check_ranks_per_worker(ranks_per_worker)
    jobs = Counter(task.type for task in tasks)
    size = len(tasks)
    if not jobs["ps"]:
        raise ValueError(f"There must be at least one ps. {_impossible(jobs, size, source, ranks_per_worker)}")
    if not jobs["worker"] and not jobs["chief"]:
        raise ValueError(f"There must be at least one worker. {_impossible(jobs, size, source, ranks_per_worker)}")
    ranks = sorted((rank for rank in range(size) if tasks[rank].type == "worker"), key=lambda r: tasks[r].index)
    if ranks_per_worker == "node":
        by_node = sorted(ranks, key=lambda rank: topology.node_of[rank])
        workers = [tuple(group) for _, group in groupby(by_node, key=lambda rank: topology.node_of[rank])]
    else:
        length = int(ranks_per_worker)
        if len(ranks) % length:
            raise ValueError(
                f"{len(ranks)} ranks of workers cannot be dealt to workers of {length} ranks. "
                + _impossible(jobs, size, source, ranks_per_worker)
            )
        workers = [tuple(ranks[start : start + length]) for start in range(0, len(ranks), length)]
    dealt = list(tasks)
    for index, members in enumerate(workers):
        for rank in members:
            dealt[rank] = Task("worker", index)
    chiefs = [(rank,) for rank in range(size) if tasks[rank].type == "chief"]
    return Roles(tuple(dealt), (*chiefs, *workers), source)


def _left_out(components: Sequence[int], environ: Mapping[str, str]) -> str:
    """Return what to add to the source of the roles where the ranks have only one component of their Slurm job."""
    if len(set(components)) != 1:
        return ""
    option = het_group_option(component_count(environ))
    return f", in one component of the Slurm job; srun {option} starts ranks in all of them"


def component_of_rank(topology: Topology, environ: Mapping[str, str]) -> list[int]:
    """Return the component of a heterogeneous Slurm job that each rank runs in, by its host.  Local.

    Empty in any other job, and where it is not certain for all ranks; ValueError where the variables cannot be read.
    """
    # PACK is what older Slurms say, and a newer one's srun that has made the job itself
    lists = [
        environ.get(f"SLURM_JOB_NODELIST_HET_GROUP_{number}") or environ.get(f"SLURM_JOB_NODELIST_PACK_GROUP_{number}")
        for number in range(component_count(environ))
    ]
    if len(lists) < 2 or not all(lists):
        return []
    hosts_of = [[short_host(host) for host in expand_hostlist(text or "")] for text in lists]
    component_of = {host: number for number, hosts in enumerate(hosts_of) for host in hosts}
    if len(component_of) < sum(map(len, hosts_of)):
        return []
    found = [component_of.get(short_host(host)) for host in topology.hosts]
    known = [each for each in found if each is not None]
    return known if len(known) == topology.size else []


def _by_component(components: Sequence[int]) -> list[str]:
    """Return the job of each rank: the last component has the servers; of three or more, the first has the chief."""
    first, last = min(components), max(components)
    trainers = [rank for rank, component in enumerate(components) if component < last]
    chief = trainers[0] if len(trainers) > 1 and components[trainers[0]] == first else None
    return [
        "ps" if component == last else "chief" if rank == chief else "worker"
        for rank, component in enumerate(components)
    ]


def _by_number(topology: Topology, count: int, ranks_per_worker: RanksPerWorker) -> list[str]:
    """Return the job of each rank for so many servers, which are spread over the nodes, the last ranks of each."""
    size, rest = topology.size, topology.size - count
    if rest < 1:
        raise ValueError(
            "There must be at least one worker. "
            + _impossible(Counter(ps=count), size, f"num_ps={count}", ranks_per_worker)
        )
    jobs = ["worker"] * size
    left = [list(ranks) for ranks in topology.ranks_of_node]
    left[topology.node_of[0]].remove(0)
    while count:
        for ranks in reversed(left):
            if ranks and count:
                jobs[ranks.pop()] = "ps"
                count -= 1
    if _has_chief(rest, ranks_per_worker):
        jobs[0] = "chief"
    return jobs


def _has_chief(trainers: int, ranks_per_worker: RanksPerWorker) -> bool:
    """Return whether one of so many ranks is to be the chief; where workers are several ranks, only if one is left."""
    if ranks_per_worker == "node":
        return False
    return trainers > 1 and (trainers - 1) % int(ranks_per_worker) == 0


def possible_split(size: int, num_ps: int, ranks_per_worker: RanksPerWorker = 1) -> str | None:
    """Return roles that `size` ranks can have, with as many servers as asked for or nearly so; None if there are none.

    Such as ``"chief:1,worker:4,ps:1"``.
    """
    length = 1 if ranks_per_worker == "node" else int(ranks_per_worker)
    for servers in sorted(range(1, size), key=lambda count: abs(count - num_ps)):
        rest = size - servers
        if rest > length and (rest - 1) % length == 0:
            return f"chief:1,worker:{rest - 1},ps:{servers}"
        if rest % length == 0:
            return f"worker:{rest},ps:{servers}"
    return None


def _impossible(jobs: Mapping[str, int], size: int, source: str, ranks_per_worker: RanksPerWorker) -> str:
    """Return the end of a message about roles that cannot be: what was asked for, and what is possible."""
    num_ps = max(jobs.get("ps", 0), 1)
    length = 1 if ranks_per_worker == "node" else int(ranks_per_worker)
    asked = ", ".join(f"{count} {job}" for job, count in jobs.items() if count) or "nothing"
    split = possible_split(size, num_ps, ranks_per_worker)
    larger = 1 + length + num_ps
    start = f"`mpidist run -n {larger} SCRIPT` (1 chief, {counted(length, 'worker rank')}, {num_ps} ps)"
    here = f"With {counted(size, 'rank')}, MPIDIST_ROLES={split} is possible; or start " if split else "Start "
    return f"Asked for ({source}): {asked}, of {counted(size, 'rank')}. {here}{start}"


def _check_ranks_per_worker(value: RanksPerWorker) -> None:
    if value != "node" and (isinstance(value, (str, bool)) or not value >= 1 or value != math.floor(value)):
        raise ValueError(f"ranks_per_worker must be a number of 1 or more, or 'node'; got {value!r}")


def _check_num_ps(tasks: Sequence[Task], num_ps: int | None, source: str, ranks_per_worker: RanksPerWorker) -> None:
    servers = sum(task.type == "ps" for task in tasks)
    if num_ps is not None and servers != num_ps:
        split = possible_split(len(tasks), num_ps, ranks_per_worker)
        raise ValueError(
            f"{source} has {servers} ps, but ParameterServerStrategy was given num_ps={num_ps}; leave num_ps out"
            + (f", or set the roles that are meant, such as MPIDIST_ROLES={split}" if split else "")
        )


def _named(job: str, first: int, last: int) -> str:
    return job if job in ("chief", "evaluator") else f"{job} {first}" + (f"-{last}" if last > first else "")


def _range(noun: str, first: int, last: int) -> str:
    return f"{noun} {first}" if first == last else f"{noun}s {first}-{last}"
