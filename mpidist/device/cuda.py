"""CUDA's memory, by CuPy."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cupy
import numpy

from mpidist.arrays import wire_dtype
from mpidist.device import nccl
from mpidist.device.kernels import CHUNK, UPDATED, Formula, convert_text, update_text

if TYPE_CHECKING:
    from mpidist.device.memory import Arrived, Link
    from mpidist.runtime.watch import Watch
    from mpidist.transports.base import Transport

#: Bytes that one block of threads copies.
_CHUNK_BYTES = 1 << 15
_THREADS = 256

#: What CUDA says of an event: it has happened; it has not yet.  All else is an error.
_SUCCESS, _NOT_READY = 0, 600

_device_of = attrgetter("data.device_id")


class CudaMemory:
    """The memory of CUDA's devices; see `DeviceMemory`."""

    def __init__(self) -> None:
        self._stream: Any = None

    def enter(self, tensors: Sequence[Any]) -> None:
        """Begin work on some arrays, behind the work that was begun before, in whichever stream that was."""
        current, device = cupy.cuda.get_current_stream(), cupy.cuda.runtime.getDevice()
        elsewhere = set(map(_device_of, tensors)) - {device}
        if elsewhere:
            other = min(elsewhere)
            raise ValueError(
                f"got an array on GPU {other} while GPU {device} is this rank's current one; a rank works on one GPU: "
                f"make the array there, or select the other with cupy.cuda.Device({other}).use()"
            )
        before, self._stream = self._stream, current
        if before is not None and before != current:
            event = cupy.cuda.Event(disable_timing=True)
            event.record(before)
            current.wait_event(event)

    def host_buffer(self, elements: int, dtype: Any) -> numpy.ndarray:
        """Return pinned memory."""
        memory = cupy.cuda.alloc_pinned_memory(max(1, elements * numpy.dtype(dtype).itemsize))
        return numpy.frombuffer(memory, dtype, elements)

    def read(self, source: Any, target: numpy.ndarray) -> Arrived:
        """Begin to copy a device array into pinned memory."""
        source.get(out=target, blocking=False)
        return _recorded()

    def write(self, source: numpy.ndarray, target: Any) -> Arrived:
        """Begin to copy pinned memory into a device array."""
        target.set(source)
        return _recorded()

    def packing(self, offsets: Sequence[int]) -> CudaPacking:
        """Return the packing of tensors."""
        return CudaPacking(offsets)

    def spans(self, tensors: Sequence[Any]) -> list[tuple[int, int]]:
        """Return address and bytes of each array."""
        return [(each.data.ptr, each.nbytes) for each in tensors]

    def joint_update(self, parameters: Sequence[Any], slots: Sequence[Sequence[Any]]) -> CudaUpdate | None:
        """Return the update of parameters whose dtypes the kernel takes."""
        if not {each.dtype.name for each in parameters} <= UPDATED:
            return None
        return CudaUpdate(self, parameters, slots)

    def link(self, transport: Transport, watch: Watch) -> Link | str:
        """Return NCCL between these ranks, or why it cannot be used."""
        return nccl.connect(transport, watch)


def _recorded() -> Arrived:
    """Return whether all that the current stream has been given so far is done."""
    event, runtime = cupy.cuda.Event(disable_timing=True), cupy.cuda.runtime
    event.record()

    def arrived() -> bool:
        status = runtime.eventQuery(event.ptr)
        if status not in (_SUCCESS, _NOT_READY):  # `Event.done` is False then, for ever
            raise runtime.CUDARuntimeError(status)
        return bool(status == _SUCCESS)

    return arrived


class CudaPacking:
    """Tensors that are copied into a flat array, and back, by one launch.

    `offsets`: where each begins, in elements; one more for the end.
    """

    def __init__(self, offsets: Sequence[int]) -> None:
        self._offsets = tuple(offsets)
        self._chunks: dict[int, Any] = {}
        self._given: tuple[int, list[int]] | None = None  # stream, and the addresses of `_addresses`
        self._addresses: Any = None

    def pack(self, tensors: Sequence[Any], flat: Any) -> None:
        """Copy tensors into the flat array."""
        if len(tensors) == 1:
            flat[...] = tensors[0].reshape(-1)
        else:
            self._move(tensors, flat, is_back=False)

    def unpack(self, flat: Any, tensors: Sequence[Any]) -> None:
        """Copy the flat array into tensors."""
        if len(tensors) == 1:
            tensors[0].reshape(-1)[...] = flat
        else:
            self._move(tensors, flat, is_back=True)

    def _move(self, tensors: Sequence[Any], flat: Any, is_back: bool) -> None:
        if not tensors:
            return
        own, is_alike = tensors[0].dtype, tensors[0].dtype == flat.dtype
        chunks = self._chunks_of(flat.itemsize if is_alike else 1)
        if len(chunks):
            kernel = _move_kernel() if is_alike else _convert_kernel(own, flat.dtype)
            kernel((len(chunks),), (_THREADS,), (self._table(tensors), chunks, flat.data.ptr, numpy.int32(is_back)))

    def _table(self, tensors: Sequence[Any]) -> Any:
        """Return the tensors' addresses on the device.

        A table belongs to the stream on which it was made: CuPy hands its memory out again in the order of that one.
        """
        given = cupy.cuda.get_current_stream().ptr, [each.data.ptr for each in tensors]
        if given != self._given:
            self._given, self._addresses = given, cupy.asarray(numpy.array(given[1], numpy.uint64))
        return self._addresses

    def _chunks_of(self, itemsize: int) -> Any:
        """Return what each block of threads copies, in bytes; in elements for an `itemsize` of 1."""
        if itemsize not in self._chunks:
            rows = [
                (tensor, start, first * itemsize + start, min(_CHUNK_BYTES, (last - first) * itemsize - start))
                for tensor, (first, last) in enumerate(pairwise(self._offsets))
                for start in range(0, (last - first) * itemsize, _CHUNK_BYTES)
            ]
            self._chunks[itemsize] = cupy.asarray(numpy.array(rows, numpy.int64).reshape(-1, 4))
        return self._chunks[itemsize]


class CudaUpdate:
    """The steps of an optimizer for some parameters, by one launch for those of a dtype."""

    def __init__(self, memory: CudaMemory, parameters: Sequence[Any], slots: Sequence[Sequence[Any]]) -> None:
        memory.enter(parameters)
        self._memory, self._parameters, self._slots = memory, parameters, slots
        positions: dict[numpy.dtype, list[int]] = {}
        for position, parameter in enumerate(parameters):
            positions.setdefault(parameter.dtype, []).append(position)
        self._parts = [(dtype, members, *self._places(members)) for dtype, members in positions.items()]

    def _places(self, members: Sequence[int]) -> tuple[int, numpy.ndarray]:
        """Return how many blocks of threads there are, and what does not change of each `Tensor` of update.cu."""
        sizes = numpy.array([self._parameters[each].size for each in members])
        blocks = -(-sizes // CHUNK)
        addresses = [[array.data.ptr for array in (self._parameters[each], *self._slots[each])] for each in members]
        return int(blocks.sum()), numpy.column_stack([blocks.cumsum() - blocks, sizes, addresses])

    def run(self, rule: Any, gradients: Sequence[Any], steps: Sequence[Any]) -> None:
        """Update parameters and slots.

        Gradients of another dtype become what is computed in: sums of 16 bits in float32 may not fit in 16.
        """
        formula, numbers = rule.in_formula(steps)
        self._memory.enter([*gradients, self._parameters[0]])
        for dtype, members, blocks, places in self._parts:
            kind = dtype if all(gradients[each].dtype == dtype for each in members) else wire_dtype(dtype)
            own = [cupy.ascontiguousarray(gradients[each], kind) for each in members]
            rows = [numbers[each] for each in members] if len(numbers) > 1 else numbers
            table = numpy.empty((len(own), places.shape[1] + 1 + len(rows[0])), numpy.int64)
            table[:, : places.shape[1]] = places
            table[:, places.shape[1]] = [each.data.ptr for each in own]
            table[:, places.shape[1] + 1 :] = numpy.array(rows, numpy.float64).view(numpy.int64)
            if blocks:
                given = cupy.asarray(table), numpy.int32(len(own))
                _update_kernel(formula, dtype, kind)((blocks,), (_THREADS,), given)


@cache
def _move_kernel() -> Any:
    return cupy.RawKernel(Path(__file__).with_name("move.cu").read_text(), "move")


@cache
def _convert_kernel(apart: numpy.dtype, together: numpy.dtype) -> Any:
    return cupy.RawKernel(convert_text(apart, together), "convert")


@cache
def _update_kernel(formula: Formula, parameter: numpy.dtype, gradient: numpy.dtype) -> Any:
    """Return the kernel, which rounds as often as NumPy."""
    return cupy.RawKernel(update_text(formula, parameter, gradient), "update", ("--fmad=false",))
