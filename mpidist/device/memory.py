"""What collectives need of a kind of device memory, whichever library its arrays are of."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy

from mpidist import arrays

if TYPE_CHECKING:
    from mpidist.device.answers import Answer, Limits
    from mpidist.runtime.control import ControlChannel
    from mpidist.runtime.watch import Watch
    from mpidist.transports.base import Transport

#: ``arrived()``: whether a copy that was begun is complete.  It never waits.
Arrived = Callable[[], bool]


class JointUpdate(Protocol):
    """The steps of optimizers for some parameters, each with its slots, all at once."""

    def run(
        self, rule: Any, gradients: Sequence[Any], steps: Sequence[Any], limits: Limits | None = None
    ) -> Answer | None:
        """Make a step for each parameter, in place.  Local.

        `gradients` are arrays of any shape and dtype, in the order of their axes.  Return the answer where `limits` may
        leave the step out.  Only a rule without a formula waits for it.
        """
        ...


class Packing(Protocol):
    """How the tensors of one bucket lie one after the other in a flat array.

    Values are multiplied by a `factor` in the dtype of `flat`, which rounds the factor and each product once.
    """

    def pack(self, tensors: Sequence[Any], flat: Any, factor: float | None = None) -> None:
        """Copy C-contiguous tensors into `flat`, converting to its dtype."""

    def unpack(self, flat: Any, tensors: Sequence[Any], factor: float | None = None) -> None:
        """Copy `flat` into C-contiguous tensors, converting to their dtype; `flat` may be multiplied, too."""


class DevicePacking(Packing, Protocol):
    """One that can tell whether tensors were changed."""

    def mark(self, tensors: Sequence[Any], target: Any) -> None:
        """Write into a uint64 a number that stands for the bytes of C-contiguous tensors.  Local."""


class Link(Protocol):
    """Collectives between the devices of some ranks; each is only begun, in the order of the device's current stream.

    Every rank calls them in the same order, with flat arrays of the same dtypes and lengths.  `bounds`: where each
    rank's part begins, in elements, and where the last one ends.  `name`: with its version.  `control`: of these ranks.
    `left`: None, or what was begun last is perhaps not begun on all ranks; then ``left()`` tells whether all that was
    begun before has been done.
    """

    name: str
    control: ControlChannel
    left: Arrived | None

    def look(self) -> None:
        """Raise if a collective that was begun has failed; the link and the control channel are broken then.  Local."""

    def is_done(self) -> bool:
        """Return whether all is done that all ranks have begun.  Local."""
        ...

    def can_reduce(self, dtype: numpy.dtype, op: str) -> bool:
        """Return whether there is such a reduction, with the host's results.  Local."""
        ...

    def reduce(self, buffer: Any, op: str, watch: Watch) -> None:
        """Reduce an array in place.  Collective."""

    def reduce_parts(self, buffer: Any, op: str, bounds: Sequence[int], watch: Watch) -> None:
        """Reduce for each rank its part, in place; the rest of the array is undefined then.  Collective."""

    def from_root(self, buffer: Any, root: int, watch: Watch) -> None:
        """Give all ranks the array of rank `root`, in place; any dtype.  Collective."""

    def gather(self, joined: Any, bounds: Sequence[int], watch: Watch) -> None:
        """Give all ranks the parts of all, where each has put its own; any dtype.  Collective."""

    def exchange(self, gives: Mapping[int, Any], places: Mapping[int, Any], watch: Watch) -> None:
        """Give other ranks C-contiguous arrays, and write into `places` what they give; any dtype.  Collective."""

    def close(self, in_order: bool) -> None:
        """Give back what it holds; `in_order` says that all ranks do so, and waits for what all have begun.  Local."""


class OwnStream(Protocol):
    """A stream beside the current one.  Each device has its own; that of the current device is used."""

    def begin(self, fn: Callable[[], None]) -> None:
        """Call what begins work: it comes behind all of the current stream's so far, and beside what comes later.

        Local.
        """

    def end(self) -> None:
        """Have what comes later in the current stream come behind all of this work.  Local."""

    def arrival(self) -> Arrived:
        """Return what tells whether all of this work is done.  Local."""
        ...


class DeviceMemory(Protocol):
    """One kind of device memory, for one process.  All work is begun on the current stream, and nothing here waits.

    `has_streams`: the work of one stream goes on whatever that of others waits for, and so does the host.
    """

    has_streams: bool

    def enter(self, tensors: Sequence[Any]) -> None:
        """Begin work on some arrays, or none, behind the work that was begun before.  Local.

        ValueError: one lies on another device than the current one.
        """

    def host_buffer(self, elements: int, dtype: Any) -> numpy.ndarray:
        """Return host memory that the device reads and writes by itself.  Local."""
        ...

    def read(self, source: Any, target: numpy.ndarray) -> Arrived:
        """Begin to copy a contiguous device array into such host memory.  Local."""
        ...

    def write(self, source: numpy.ndarray, target: Any) -> Arrived:
        """Begin to copy such host memory into a contiguous device array.  Local."""
        ...

    def kept(self, array: Any) -> Any:
        """Return a device array that several streams use; its memory is given back behind their work.  Local."""
        ...

    def trim(self) -> None:
        """Give back to the device what no array uses; may wait for it.  Local."""

    def own_stream(self) -> OwnStream:
        """Return a stream beside others.  Local."""
        ...

    def packing(self, offsets: Sequence[int]) -> DevicePacking:
        """Return the packing of tensors that begin at these elements; one more for the end.  Local."""
        ...

    def spans(self, tensors: Sequence[Any]) -> list[tuple[int, int]]:
        """Return address and bytes of each array.  Local."""
        ...

    def joint_update(self, parameters: Sequence[Any], slots: Sequence[Sequence[Any]]) -> JointUpdate | None:
        """Return the update of flat contiguous arrays, each with its slots; None where it is not known.  Local."""
        ...

    def link(self, transport: Transport, watch: Watch) -> Link | str:
        """Return the device's own collectives between these ranks, or why there are none, alike on all ranks.

        Collective: every rank calls it, within a begun call.

        TransportError: they are there, and could not be set up; on all ranks.
        """
        ...


_memories: dict[str, DeviceMemory] = {}


def register(kind: str, memory: DeviceMemory) -> None:
    """Make the memory of a kind of arrays known; Local."""
    _memories[kind] = memory


def unregister(kind: str) -> None:
    """Forget the memory of a kind of arrays that was registered; Local."""
    del _memories[kind]


def memory_of(array: Any) -> DeviceMemory | None:
    """Return the memory in which an array lies; None for the host's, and for one that nothing is known of.  Local."""
    if isinstance(array, numpy.ndarray):  # quickly: servers ask for every gradient
        return None
    kind = arrays.kind_of(array)
    if kind.memory == "host":
        return None
    if kind.name == "cupy" and kind.name not in _memories:
        from mpidist.device.cuda import CudaMemory

        register(kind.name, CudaMemory())
    return _memories.get(kind.name)


def kept(array: Any) -> Any:
    """Return an array for several calls, in whichever streams.  Local."""
    memory = memory_of(array)
    return array if memory is None else memory.kept(array)


def kept_empty(shape: Any, dtype: Any, like: Any) -> Any:
    """Return an uninitialised array for several calls, in the memory of `like`.  Local."""
    return kept(arrays.empty(shape, dtype, like))
