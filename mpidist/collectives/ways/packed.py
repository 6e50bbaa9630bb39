"""A bucket that is packed into a flat buffer, which is then reduced: over messages, or by what its device has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

from mpidist import arrays
from mpidist.collectives.observer import Observer
from mpidist.collectives.ways.bucket_reduction import BucketReduction
from mpidist.collectives.ways.pieces import Pieces, Transform
from mpidist.collectives.ways.scratch import Scratch
from mpidist.device.memory import Packing, kept_empty, memory_of
from mpidist.runtime.control import Watch
from mpidist.runtime.trace_kinds import PACK, UNPACK

#: ``reduce(watch, buffer)`` reduces into a flat buffer of one length and dtype, within the begun call of `watch`.
#: `Native` may take this rank's values from a third argument, which is like the buffer and stays as it is.
Replay = Callable[..., None]


class PlainPacking:
    """The packing of tensors of any kind, by what their library has.

    `observer` is told when they are packed and handed out.
    """

    def __init__(self, pieces: Pieces, observer: Observer) -> None:
        self._gather = observer.function(PACK, pack)
        self._scatter = observer.function(UNPACK, partial(pieces.scatter, 0))

    def pack(self, tensors: Sequence[Any], flat: Any, factor: float | None = None) -> None:
        """Copy tensors into `flat`, multiplied."""
        self._gather(tensors, flat)
        _multiply(flat, factor)

    def unpack(self, flat: Any, tensors: Sequence[Any], factor: float | None = None) -> None:
        """Copy `flat` into tensors, multiplied."""
        _multiply(flat, factor)
        self._scatter(flat, tensors)


class PackedReduction(BucketReduction):
    """Tensors that are packed into a flat buffer, which is reduced; see `bind_packed`.

    The buffer is the only target, where its dtype is the one in which values are reduced; else it is work memory.
    `is_flat`: there is but one target, in the dtype in which values are reduced.  ``work()`` returns a flat array,
    which other reductions use as well, but not at the same time.  `factors` are for values and for results.
    """

    def __init__(
        self,
        reduce: Replay,
        sources: Packing,
        targets: Packing,
        is_flat: bool,
        elements: int,
        work: Callable[[], Any],
        factors: tuple[float | None, float | None],
        is_apart: bool,
    ) -> None:
        self._reduce, self._work = reduce, work
        self._prescale, self._scale = factors
        self._pack, self._unpack = sources.pack, targets.unpack
        self._is_flat, self._is_apart = is_flat, is_apart
        self.owned = [(0, elements)]

    def run(
        self, watch: Watch, sources: Sequence[Any], targets: Sequence[Any], transform: Transform | None = None
    ) -> None:
        """Reduce the tensors; each rank transforms all of them by itself."""
        is_target = self._is_flat and transform is None and _is_aligned(targets[0])
        buffer = targets[0].reshape(-1) if is_target else self._work()
        if is_target and self._is_apart and sources[0] is not targets[0]:
            self._reduce(watch, buffer, self._apart(sources, buffer))
        else:
            is_in_place = is_target and len(sources) == 1 and sources[0] is targets[0] and self._prescale is None
            if not is_in_place:
                self._pack(sources, buffer, self._prescale)
            self._reduce(watch, buffer)
        if transform is None and not is_target:
            self._unpack(buffer, targets, self._scale)
        else:
            _multiply(buffer, self._scale)
        if transform is not None:
            transform(0, buffer)

    def _apart(self, sources: Sequence[Any], buffer: Any) -> Any:
        """Return the values as one flat array that is not the buffer."""
        if len(sources) == 1 and sources[0].dtype == buffer.dtype and _is_aligned(sources[0]):
            return sources[0].reshape(-1)
        values = self._work()
        self._pack(sources, values)
        return values


def _is_aligned(array: Any) -> bool:
    """Return whether values lie at multiples of their size; MPI for Python knows no dtypes of others."""
    return getattr(array.flags, "aligned", True)  # a device's flags have no such one


def bind_packed(
    reduce: Replay,
    kind: Any,
    sources: Pieces,
    targets: Pieces,
    dtypes: Sequence[Any],
    scale: float | None,
    is_apart: bool,
    scratch: Scratch,
    observer: Observer,
    prescale: float | None = None,
) -> PackedReduction:
    """Return the reduction of tensors that are packed.  Local.

    `kind` is an empty array of the kind that is reduced; `dtypes` are those of the sources, of what is added, and of
    the targets.  Values are multiplied by `prescale`, reduced ones by `scale`, both in the dtype of what is added.
    `is_apart`: values and results had better lie apart.  `scratch` is work memory of the host, and `observer` is told
    when tensors of the host are packed and handed out.
    """
    source, dtype, result = dtypes
    is_flat = targets.is_single and dtype == result
    memory = memory_of(kind)

    def packing(pieces: Pieces) -> Packing:
        return PlainPacking(pieces, observer) if memory is None else memory.packing(pieces.offsets)

    elements = sources.elements
    own = partial(kept_empty, elements, dtype, kind)
    work = cache(own) if arrays.is_device(kind) else partial(scratch.array, (elements,), dtype)
    is_apart &= is_flat and prescale is None
    if not is_flat or (is_apart and (not sources.is_single or source != dtype)):
        work()  # before any call is begun: a rank that has no memory for it raises, and stays in step
    factors = prescale, scale
    return PackedReduction(reduce, packing(sources), packing(targets), is_flat, elements, work, factors, is_apart)


def _multiply(values: Any, factor: float | None) -> None:
    if factor is not None:
        arrays.namespace(values).multiply(values, factor, out=values)


def pack(tensors: Sequence[Any], out: Any) -> None:
    """Copy tensors, one after the other in C order, into `out`, converting to its dtype; it is flat but for one."""
    if len(tensors) == 1:
        out[...] = tensors[0].reshape(out.shape)
    elif tensors:
        arrays.namespace(out).concatenate(tensors, axis=None, out=out)
