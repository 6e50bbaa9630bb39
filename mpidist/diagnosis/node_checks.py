"""Checks of a node: its cores, its memory, and the folder for checkpoints."""

from __future__ import annotations

from collections.abc import Iterator

from mpidist.diagnosis.case import Case, ranks_text
from mpidist.diagnosis.finding import Finding, fail, ok, warn
from mpidist.errors import counted

#: What a node's ranks should find free in /dev/shm, and each of them in memory.
SHARED_BYTES, RANK_BYTES = 256 * 2**20, 512 * 2**20

#: Files that a process should be able to open, besides a few for each rank: connections are files.
_FILES, _FILES_A_RANK = 256, 4

#: What should be free in the folder.
FREE_BYTES = 2**30


# -- cores -------------------------------------------------------------------------------------------------------------


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


# -- memory ------------------------------------------------------------------------------------------------------------


def check_shared_memory(case: Case) -> Iterator[Finding]:
    """Find nodes with little or no /dev/shm; MPI, NCCL and data loaders use it, mpidist itself does not."""
    least, is_scarce = None, False
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
        is_scarce = True
    if not is_scarce and least is not None:
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
    findings = []
    if memory is not None:
        findings.append(warn(f"memory of a process is limited to {_gib(memory)}", "ulimit -v unlimited"))
    if locked is not None and any(rank.ports for rank in case.ranks):
        findings.append(warn(f"memory for InfiniBand is limited to {_gib(locked)}", "ulimit -l unlimited"))
    needed = _FILES + _FILES_A_RANK * case.size
    if files is not None and files < needed:
        text = f"a process may open {files} files, and {case.size} ranks may need {needed}"
        findings.append(warn(text, f"ulimit -n {max(4096, needed)}"))
    yield from findings or [ok("of memory and of open files: none in the way")]


def _least(case: Case, name: str) -> int | None:
    """Return the lowest of a limit over the ranks; None where none has one."""
    limits = (rank.limits.get(name) for rank in case.ranks)
    return min((limit for limit in limits if limit is not None), default=None)


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.1f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.0f} MiB"


# -- files -------------------------------------------------------------------------------------------------------------


def check_folder(case: Case) -> Iterator[Finding]:
    """Find whether all ranks can write to the folder, and see there what others have written."""
    path, blind = case.own.folder.path, case.joint.blind if case.joint is not None else ()
    unable = [rank for rank, each in enumerate(case.ranks) if each.folder.error]
    free = min(each.folder.free_bytes for each in case.ranks)
    if unable:
        first = case.ranks[unable[0]]
        text = f"{path}: {ranks_text(unable)} ({first.host}) cannot write there: {first.folder.error}"
        yield fail(
            text, f"mkdir -p {path}" if "No such file" in first.folder.error else "mpidist doctor --folder OTHER"
        )
    elif blind:
        text = f"{path}: {', '.join(blind[:4])} does not see a file of rank 0 there; it is not shared between nodes"
        yield fail(text, "mpidist doctor --folder $SCRATCH")
    elif free < FREE_BYTES:
        yield warn(f"{path}: {free / 2**20:.0f} MiB free", f"df -h {path}")
    else:
        seen = ", seen by all nodes" if len(case.ranks_of_host) > 1 else ""
        yield ok(f"{path}: writable, {free / 2**30:.1f} GiB free{seen}")


def check_locks(case: Case) -> Iterator[Finding]:
    """Find whether files in the folder can be locked, as HDF5 does."""
    if any(each.folder.error for each in case.ranks):
        return
    error = next((each.folder.lock_error for each in case.ranks if each.folder.lock_error), "")
    off = all(each.environ.get("HDF5_USE_FILE_LOCKING", "").upper() in ("FALSE", "0") for each in case.ranks)
    if error and not off:
        yield fail(f"none in {case.own.folder.path}, and HDF5 locks: {error}", "export HDF5_USE_FILE_LOCKING=FALSE")
    elif error:
        yield ok("none there, and HDF5 is told not to lock")
    else:
        yield ok("files there can be locked")


def check_h5py(case: Case) -> Iterator[Finding]:
    """Find whether checkpoints can be written, and whether by all ranks into one file."""
    missing = [rank for rank, each in enumerate(case.ranks) if each.h5py.get("error")]
    if missing:
        first = case.ranks[missing[0]]
        yield fail(f"{ranks_text(missing)} ({first.host}): {first.h5py['error']}; no checkpoints", "pip install h5py")
    elif case.own.h5py:
        own = case.own.h5py
        kind = "with parallel I/O" if own["parallel"] else "without parallel I/O, which checkpoints do not need"
        yield ok(f"{own['version']}, HDF5 {own['hdf5']}, {kind}")
