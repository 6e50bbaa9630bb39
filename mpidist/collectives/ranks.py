"""What persistent collectives need of the ranks that they are bound to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from mpidist.cluster.topology import Topology
from mpidist.collectives.bindings import Bindings
from mpidist.collectives.call import Call
from mpidist.collectives.observer import Observer
from mpidist.collectives.persistent import Started
from mpidist.collectives.ways.bucket_reduction import BucketReduction
from mpidist.collectives.ways.messages import Replay
from mpidist.collectives.ways.pieces import Pieces
from mpidist.collectives.ways.selection import Way
from mpidist.collectives.ways.shared_memory import SegmentAllReduce
from mpidist.runtime.control import ControlChannel, Watch
from mpidist.transports.base import Transport
from mpidist.transports.node_memory import SharedSegments

if TYPE_CHECKING:
    from mpidist.collectives.engine import Engine
    from mpidist.collectives.ways.device_ways import DeviceWays


class Ranks(Protocol):
    """A set of ranks, and what an all-reduce over them can be bound to; see `Communicator`."""

    rank: int
    size: int
    topology: Topology
    control: ControlChannel
    transport: Transport
    segments: SharedSegments | None
    begin: Callable[..., Watch]
    started: Started
    in_shared_memory: dict[int, Any]
    bindings: Bindings
    observer: Observer
    devices: DeviceWays

    def prepare(self, call: Call, algorithm: str | None = None, timeout_seconds: float | None = None) -> None:
        """Load what was stored of these ranks, before the first binding.  Collective."""

    def engine(
        self, bytes_per_pack: int = 0, algorithm: str | None = None, timeout_seconds: float | None = None
    ) -> Engine:
        """Return what reduces lists of tensors under these options.  Local."""
        ...

    def way(self, nbytes: int, algorithm: str | None, on_host: bool = True) -> Way:
        """Return the way of a unit of `nbytes`.  Local."""
        ...

    def bytes_per_pack(self, algorithm: str | None, on_host: bool = True) -> int:
        """Return from what size in bytes on a pack is closed.  Local."""
        ...

    def small(self, shape: tuple[int, ...], dtype: Any, op: str) -> SegmentAllReduce | None:
        """Return the all-reduce in one step through shared memory, if it is the one for such arrays.  Local."""

    def reduction(
        self,
        way: Way,
        sources: Pieces,
        targets: Pieces,
        dtypes: Sequence[Any],
        op: str,
        scale: float | None = None,
    ) -> BucketReduction | None:
        """Return the reduction of tensors where they lie, None for a way that needs them packed.  Local."""

    def bind(self, buffer: Any, op: str, algorithm: str | None = None, is_example: bool = False) -> Replay:
        """Return what reduces a packed buffer over messages.  Local."""
        ...

    def exchange(self, payload: bytes, what: str = "exchange", timeout_seconds: float | None = None) -> list[bytes]:
        """Return the byte string that every rank gave.  Collective."""
        ...

    def all_reduce(
        self, buffer: Any, op: str = "sum", algorithm: str | None = None, timeout_seconds: float | None = None
    ) -> None:
        """Reduce an array over all ranks, in place.  Collective."""

    def all_gather(self, array: Any, axis: int = 0, timeout_seconds: float | None = None) -> Any:
        """Return the arrays of all ranks, joined along an axis.  Collective."""
