"""What findings are drawn from: what each rank saw of itself, and what the ranks measured together.

These are plain values: they are sent between ranks, and written down by tests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from mpidist.cluster.launchers import Launcher
from mpidist.cluster.topology import Topology


@dataclass(frozen=True)
class Folder:
    """What a rank found out about the folder for checkpoints; `error` says why files cannot be written there."""

    path: str
    error: str = ""
    lock_error: str = ""  # why a file there cannot be locked
    free_bytes: int = 0


@dataclass(frozen=True)
class Observation:
    """What one process saw of itself and of its machine; None is what the system does not tell, or does not limit."""

    host: str
    software: Mapping[str, str] = field(default_factory=dict)  # what has to be alike on all ranks, by what it is
    environ: Mapping[str, str] = field(default_factory=dict)  # the variables that findings look at
    processors: tuple[int, ...] = ()  # on which it may run
    core_count: int = 0  # physical ones among them
    machine_processors: int = 0
    threads: int | None = None  # of NumPy's linear algebra
    shared_memory: tuple[int, int] | None = None  # bytes of /dev/shm: all, free
    memory_bytes: int | None = None  # what can still be had, of the machine and its control group
    limits: Mapping[str, int | None] = field(default_factory=dict)  # of ulimit: "memory", "locked", "files"
    interfaces: tuple[str, ...] = ()  # of the network, those that are up and have an address
    ports: tuple[str, ...] = ()  # of InfiniBand, those that are active, as mlx5_0:1
    h5py: Mapping[str, Any] = field(default_factory=dict)
    folder: Folder = Folder(".")
    has_driver: bool = False  # whether GPUs are to be expected
    cuda: Mapping[str, Any] = field(default_factory=dict)  # what CuPy says of GPUs
    mpi_takes_cards: str = ""  # "" not tried, "yes", or why MPI does not take arrays in GPU memory


@dataclass(frozen=True)
class NodePair:
    """What two nodes can send to each other, and the interface of the first through which it went."""

    nodes: tuple[str, str]
    bytes_per_second: float
    through: str = ""


@dataclass(frozen=True)
class Joint:
    """What the ranks of a world found out together."""

    hosts: tuple[str, ...]
    thread_level: str = "THREAD_MULTIPLE"
    reduction_error: str = ""  # why the all-reduce is wrong, or failed
    reduction_bytes: int = 0
    clocks: Mapping[str, float] = field(default_factory=dict)  # by node: seconds ahead of the first one's clock
    pairs: tuple[NodePair, ...] = ()
    blind: tuple[str, ...] = ()  # nodes that do not see a file that rank 0 has written to the folder

    @cached_property
    def topology(self) -> Topology:
        """The nodes of the ranks."""
        return Topology(self.hosts)


@dataclass(frozen=True)
class Case:
    """All that is known.

    Attributes
    ----------
    ranks : tuple of Observation
        By rank; of a process alone, or whose world could not be joined, one.
    mpi : str
        Vendor and version of the library that mpi4py loads; empty without one.
    mpi_error : str
        Why there is none.
    mpirun, mpirun_error : str
        The launcher that belongs to it, or why there is none; both empty where nobody looked.
    plugins : tuple of str or None
        What ``srun --mpi=list`` shows; None where there is no srun, it shows nothing, or nobody looked.
    plugin : str
        What srun takes by itself.
    join_error : str
        Why the world could not be joined.
    joint : Joint or None
        None for a process alone.
    """

    ranks: tuple[Observation, ...]
    launcher: Launcher | None = None
    mpi: str = ""
    mpi_error: str = ""
    mpirun: str = ""
    mpirun_error: str = ""
    plugins: tuple[str, ...] | None = None
    plugin: str = ""
    join_error: str = ""
    joint: Joint | None = None

    @property
    def own(self) -> Observation:
        """What rank 0 saw."""
        return self.ranks[0]

    @property
    def size(self) -> int:
        """The number of ranks that were looked at."""
        return len(self.ranks)

    @cached_property
    def ranks_of_host(self) -> dict[str, list[int]]:
        """By host: its ranks."""
        found: dict[str, list[int]] = {}
        for rank, observation in enumerate(self.ranks):
            found.setdefault(observation.host, []).append(rank)
        return found


def ranks_text(ranks: Sequence[int]) -> str:
    """Return ``rank 3``, ``ranks 0-3``, ``ranks 0, 2, 5``."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    in_a_row = ranks[-1] - ranks[0] + 1 == len(ranks) > 2
    return f"ranks {ranks[0]}-{ranks[-1]}" if in_a_row else f"ranks {', '.join(map(str, ranks))}"
