"""Checks of memory: what the ranks of a node share, what is left of it, and what limits it."""

from __future__ import annotations

from collections.abc import Iterator

from mpidist.diagnosis.case import Case
from mpidist.diagnosis.finding import Finding, ok, warn

#: What a node's ranks should find free in /dev/shm, and each of them in memory.
SHARED_BYTES, RANK_BYTES = 256 * 2**20, 512 * 2**20

#: Files that a process should be able to open, besides a few for each rank: connections are files.
_FILES, _FILES_A_RANK = 256, 4


def check_shared_memory(case: Case) -> Iterator[Finding]:
    """Find nodes with little or no /dev/shm; MPI, NCCL and data loaders use it, mpidist itself does not."""
    least, found = None, False
    for host, ranks in case.ranks_of_host.items():
        shared = case.ranks[ranks[0]].shared_memory
        if shared is None:
            yield warn(f"{host} has no /dev/shm, where MPI and NCCL share memory", "docker run --shm-size=1g")
        elif shared[0] < SHARED_BYTES:
            yield warn(f"{host}: /dev/shm has {_gib(shared[0])}", "docker run --shm-size=1g")
        elif shared[1] < SHARED_BYTES:
            yield warn(f"{host}: {_gib(shared[1])} of /dev/shm are free", "ls -l /dev/shm")
        else:
            least = shared[1] if least is None else min(least, shared[1])
            continue
        found = True
    if not found and least is not None:
        yield ok(f"{_gib(least)} or more of /dev/shm free on each node")


def check_memory(case: Case) -> Iterator[Finding]:
    """Find nodes on which little memory is left for each rank."""
    shares = []
    for host, ranks in case.ranks_of_host.items():
        rooms = [room for rank in ranks if (room := case.ranks[rank].memory_bytes) is not None]
        if not rooms:
            continue
        shares.append(share := min(rooms) // len(ranks))
        if share < RANK_BYTES:
            cure = (
                "sbatch --mem=0" if "SLURM_JOB_ID" in case.own.environ else f"mpidist run -n {max(1, len(ranks) // 2)}"
            )
            yield warn(f"{host}: {_gib(share)} are left for each of {len(ranks)} ranks", cure)
    if shares and min(shares) >= RANK_BYTES:
        yield ok(f"{_gib(min(shares))} or more left for each rank")


def check_limits(case: Case) -> Iterator[Finding]:
    """Find limits of ulimit that stop a job in the middle."""
    memory, locked, files = (_least(case, name) for name in ("memory", "locked", "files"))
    found = []
    if memory is not None:
        found.append(warn(f"memory of a process is limited to {_gib(memory)}", "ulimit -v unlimited"))
    if locked is not None and any(rank.ports for rank in case.ranks):
        found.append(warn(f"memory for InfiniBand is limited to {_gib(locked)}", "ulimit -l unlimited"))
    needed = _FILES + _FILES_A_RANK * case.size
    if files is not None and files < needed:
        text = f"a process may open {files} files, and {case.size} ranks may need {needed}"
        found.append(warn(text, f"ulimit -n {max(4096, needed)}"))
    yield from found or [ok("of memory and of open files: none in the way")]


def _least(case: Case, name: str) -> int | None:
    """Return the lowest of a limit over the ranks; None where none has one."""
    limits = (rank.limits.get(name) for rank in case.ranks)
    return min((limit for limit in limits if limit is not None), default=None)


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.1f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.0f} MiB"
