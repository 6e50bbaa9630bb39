"""Checks of cores: how many the ranks of a node may run on, and how many threads they start there."""

from __future__ import annotations

from collections.abc import Iterator

from mpidist.diagnosis.case import Case
from mpidist.diagnosis.finding import Finding, ok, warn
from mpidist.errors import counted


def check_cores(case: Case) -> Iterator[Finding]:
    """Find nodes whose ranks may run on fewer cores than they are."""
    crowded = False
    for host, ranks in case.ranks_of_host.items():
        cores, first = _cores(case, ranks), case.ranks[ranks[0]]
        if cores >= len(ranks):
            continue
        crowded = True
        if len(_union(case, ranks)) < first.machine_processors:
            text = f"{len(ranks)} ranks are bound to {counted(cores, 'core')} of {first.machine_processors} processors"
            yield warn(
                f"{host}: {text}", f"srun --cpus-per-task=1 --cpu-bind=cores; mpirun -n {len(ranks)} --bind-to none"
            )
        else:
            text = f"{len(ranks)} ranks share {counted(cores, 'core')}, and wait for each other's turn"
            yield warn(f"{host}: {text}", f"mpidist run -n {cores}; srun --ntasks-per-node={cores}")
    if not crowded:
        fewest = min(_cores(case, ranks) // len(ranks) for ranks in case.ranks_of_host.values())
        yield ok(f"{counted(fewest, 'core')} a rank, {_bound(case)}")


def _bound(case: Case) -> str:
    if any(len(each.processors) == each.machine_processors for each in case.ranks):
        return "not bound"
    counts = sorted({len(each.processors) for each in case.ranks})
    several = f"{counts[0]} to {counts[-1]} processors"
    return f"bound to {counted(counts[0], 'processor') if len(counts) == 1 else several} each"


def check_threads(case: Case) -> Iterator[Finding]:
    """Find nodes whose ranks have more threads of linear algebra than cores."""
    crowded = False
    for host, ranks in case.ranks_of_host.items():
        own = min(case.ranks[rank].core_count for rank in ranks)
        cores, threads = _cores(case, ranks), max(case.ranks[rank].threads or 1 for rank in ranks)
        # ranks that alone are too many for the cores are told above
        if threads == 1 or threads <= own and threads * len(ranks) <= cores:
            continue
        crowded = True
        asked = case.ranks[ranks[0]].environ.get("OMP_NUM_THREADS", "not set")
        which = f"{counted(len(ranks), 'rank')} x {threads} threads on {counted(cores, 'core')}"
        each = max(1, min(cores // len(ranks), own))
        yield warn(f"{host}: {which}, OMP_NUM_THREADS {asked}", f"export OMP_NUM_THREADS={each}")
    if not crowded and case.own.threads is not None:
        yield ok(f"{counted(case.own.threads, 'thread')} of linear algebra a rank")


def _union(case: Case, ranks: list[int]) -> set[int]:
    return {processor for rank in ranks for processor in case.ranks[rank].processors}


def _cores(case: Case, ranks: list[int]) -> int:
    """Return how many physical cores some ranks of a node have together; two processors of one core count once."""
    first = case.ranks[ranks[0]]
    if not first.processors:
        return max(1, first.core_count)
    return max(1, round(len(_union(case, ranks)) * first.core_count / len(first.processors)))
