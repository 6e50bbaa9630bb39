"""CUDA's memory, by CuPy."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import finalize

import cupy
import numpy

from mpidist.arrays import wire_dtype
from mpidist.device import nccl
from mpidist.device.answers import Answer
from mpidist.device.kernels import (
    CHUNK,
    MULTIPLIED,
    THREADS,
    UPDATED,
    Formula,
    convert_text,
    judge_text,
    measure_text,
    update_text,
)
from mpidist.device.pinned import PinnedMemory, event_of, has_happened
from mpidist.device.waiting import recorded

if TYPE_CHECKING:
    from mpidist.device.answers import Limits
    from mpidist.device.memory import Arrived, Link
    from mpidist.runtime.watch import Watch
    from mpidist.transports.base import Transport

#: Bytes that one block of threads copies.
_CHUNK_BYTES = 1 << 15
#: Bytes of a double.
_DOUBLE = 8

_device_of = attrgetter("data.device_id")


class CudaMemory:
    """The memory of CUDA's devices; see `DeviceMemory`."""

    def __init__(self) -> None:
        asked = os.environ
        self.has_streams = (asked.get("CUDA_LAUNCH_BLOCKING") or "0") == "0"
        self.has_streams &= asked.get("CUDA_DEVICE_MAX_CONNECTIONS") != "1"
        self._last: tuple[int, Any] | None = None  # GPU and stream of the work that was begun last
        self._pinned = PinnedMemory()

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
        self._order(device, current)
        self._last = device, current

    def _order(self, device: int, stream: Any) -> None:
        """Order a stream of the current GPU behind the work that was begun before, on whichever GPU that was."""
        before = self._last
        if before is not None and before != (device, stream):
            with cupy.cuda.Device(before[0]):  # an event is one of its stream's GPU
                event = event_of(before[1])
            stream.wait_event(event)

    def host_buffer(self, elements: int, dtype: Any) -> numpy.ndarray:
        """Return pinned memory."""
        return self._pinned.empty(elements, dtype)

    def read(self, source: Any, target: numpy.ndarray) -> Arrived:
        """Begin to copy a device array into pinned memory."""
        source.data.copy_to_host_async(target.ctypes.data, target.nbytes)
        event = event_of(cupy.cuda.get_current_stream())
        self._pinned.keep(target, event)
        return partial(has_happened, event)

    def write(self, source: numpy.ndarray, target: Any) -> Arrived:
        """Begin to copy pinned memory into a device array."""
        target.set(source)
        return recorded()

    def kept(self, array: Any) -> Any:
        """Return an array made in the current stream: CuPy hands its memory out again in the order of that one."""
        finalize(array, self._give_back, cupy.cuda.Device(), cupy.cuda.get_current_stream()).atexit = False
        return array

    def _give_back(self, device: Any, stream: Any) -> None:
        """Order the stream of memory that is given back, in whichever thread; its current device may be another."""
        with device:
            self._order(device.id, stream)

    def table(self, values: numpy.ndarray) -> Any:
        """Return an array of the host on the device, for kernels in any stream."""
        return self.kept(cupy.asarray(values))

    def trim(self) -> None:
        """Empty CuPy's pool."""
        cupy.get_default_memory_pool().free_all_blocks()

    def own_stream(self) -> CudaStream:
        """Return a stream beside others."""
        return CudaStream()

    def packing(self, offsets: Sequence[int]) -> CudaPacking:
        """Return the packing of tensors."""
        return CudaPacking(self, offsets)

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


class CudaStream:
    """A stream of each GPU, beside the current one; see `OwnStream`."""

    def __init__(self) -> None:
        self._of = cache(lambda device: cupy.cuda.Stream(non_blocking=True))

    @property
    def _own(self) -> Any:
        return self._of(cupy.cuda.runtime.getDevice())

    def begin(self, fn: Callable[[], None]) -> None:
        """Call what begins work."""
        own = self._own
        own.wait_event(event_of(cupy.cuda.get_current_stream()))
        with own:
            fn()

    def end(self) -> None:
        """Order the current stream behind this one."""
        cupy.cuda.get_current_stream().wait_event(event_of(self._own))

    def arrival(self) -> Arrived:
        """Return what tells whether its work is done."""
        return partial(has_happened, event_of(self._own))


class CudaPacking:
    """Tensors that are copied into a flat array, and back, by one launch.

    `offsets`: where each begins, in elements; one more for the end.
    """

    def __init__(self, memory: CudaMemory, offsets: Sequence[int]) -> None:
        self._memory, self._offsets = memory, tuple(offsets)
        self._chunks: dict[int, Any] = {}
        self._given: list[int] = []  # the addresses of `_addresses`
        self._addresses: Any = None

    def pack(self, tensors: Sequence[Any], flat: Any, factor: float | None = None) -> None:
        """Copy tensors into the flat array, multiplied."""
        if len(tensors) == 1:
            _copy(tensors[0].reshape(-1), flat, factor, flat.dtype)
        elif factor is not None and flat.dtype.name not in MULTIPLIED:
            self._move(tensors, flat, None, is_back=False)
            _copy(flat, flat, factor, flat.dtype)
        else:
            self._move(tensors, flat, factor, is_back=False)

    def unpack(self, flat: Any, tensors: Sequence[Any], factor: float | None = None) -> None:
        """Copy the flat array into tensors, multiplied."""
        if len(tensors) == 1:
            _copy(flat, tensors[0].reshape(-1), factor, flat.dtype)
        elif factor is not None and flat.dtype.name not in MULTIPLIED:
            _copy(flat, flat, factor, flat.dtype)
            self._move(tensors, flat, None, is_back=True)
        else:
            self._move(tensors, flat, factor, is_back=True)

    def _move(self, tensors: Sequence[Any], flat: Any, factor: float | None, is_back: bool) -> None:
        if not tensors:
            return
        own, as_bytes = tensors[0].dtype, factor is None and tensors[0].dtype == flat.dtype
        chunks = self._chunks_of(flat.itemsize if as_bytes else 1)
        if not len(chunks):
            return
        kernel = _move_kernel() if as_bytes else _convert_kernel(own, flat.dtype, factor is not None)
        numbers = () if as_bytes else (numpy.float64(1 if factor is None else factor),)
        places = self._table(tensors), chunks, flat.data.ptr, numpy.int32(is_back)
        kernel((len(chunks),), (THREADS,), (*places, *numbers))

    def mark(self, tensors: Sequence[Any], target: Any) -> None:
        """Write a number that stands for their bytes."""
        target.fill(0)
        chunks = self._chunks_of(tensors[0].itemsize)
        if len(chunks):
            _mark_kernel()((len(chunks),), (THREADS,), (self._table(tensors), chunks, target))

    def _table(self, tensors: Sequence[Any]) -> Any:
        """Return the tensors' addresses on the device."""
        given = [each.data.ptr for each in tensors]
        if given != self._given:
            self._given, self._addresses = given, self._memory.table(numpy.array(given, numpy.uint64))
        return self._addresses

    def _chunks_of(self, itemsize: int) -> Any:
        """Return what each block of threads copies, in bytes; in elements for an `itemsize` of 1."""
        if itemsize not in self._chunks:
            rows = [
                (tensor, start, first * itemsize + start, min(_CHUNK_BYTES, (last - first) * itemsize - start))
                for tensor, (first, last) in enumerate(pairwise(self._offsets))
                for start in range(0, (last - first) * itemsize, _CHUNK_BYTES)
            ]
            self._chunks[itemsize] = self._memory.table(numpy.array(rows, numpy.int64).reshape(-1, 4))
        return self._chunks[itemsize]


class _Part(NamedTuple):
    """The parameters of a dtype.

    `members` are their positions.  Each has a row in the table for update.cu; what does not change of it is in `begins`
    and `addresses`.  `blocks` of threads update them; those of the parts before this one are `before`.
    """

    dtype: numpy.dtype
    members: list[int]
    begins: numpy.ndarray
    addresses: numpy.ndarray
    blocks: int
    before: int


class CudaUpdate:
    """The steps of an optimizer for some parameters: by a formula in one launch for those of a dtype."""

    def __init__(self, memory: CudaMemory, parameters: Sequence[Any], slots: Sequence[Sequence[Any]]) -> None:
        memory.enter(parameters)
        self._memory, self._parameters, self._slots = memory, parameters, slots
        positions: dict[numpy.dtype, list[int]] = {}
        for position, parameter in enumerate(parameters):
            if parameter.size:
                positions.setdefault(parameter.dtype, []).append(position)
        self._parts: list[_Part] = []
        for dtype, members in positions.items():
            self._parts.append(self._part(dtype, members))
        self._spans: dict[bool, Any] = {}

    def _part(self, dtype: numpy.dtype, members: list[int]) -> _Part:
        sizes = numpy.array([self._parameters[each].size for each in members])
        blocks = -(-sizes // CHUNK)
        addresses = [[array.data.ptr for array in (self._parameters[each], *self._slots[each])] for each in members]
        begins = numpy.column_stack([blocks.cumsum() - blocks, sizes])
        return _Part(dtype, members, begins, numpy.array(addresses, numpy.int64), int(blocks.sum()), self._blocks)

    @property
    def _blocks(self) -> int:
        """The blocks of threads of all parts."""
        return sum(part.blocks for part in self._parts)

    def run(
        self, rule: Any, gradients: Sequence[Any], steps: Sequence[Any], limits: Limits | None = None
    ) -> Answer | None:
        """Update parameters and slots, by the rule's own `update` where there is no formula.

        Gradients of another dtype become what is computed in: sums of 16 bits in float32 may not fit in 16.
        """
        formula, numbers = rule.in_formula(steps) if rule.has_formula else (None, [()])
        self._memory.enter([*gradients, self._parameters[0]])
        parts = () if formula is None and limits is None else self._parts
        tables = [(part, *_table(part, gradients, numbers)) for part in parts]
        verdict = None if limits is None else self._verdict(tables, limits)
        answer = self._answer(verdict) if limits is not None and limits.skips_nonfinite else None
        is_each = limits is not None and limits.is_each
        if formula is not None:
            _launch(formula, tables, verdict, is_each)
        elif answer is None or not answer():
            shrinkages = {} if limits is None or limits.norm is None else self._shrinkages(verdict, is_each)
            self._update_one_by_one(rule, gradients, steps, shrinkages)
        return answer

    def _update_one_by_one(
        self, rule: Any, gradients: Sequence[Any], steps: Sequence[Any], shrinkages: Mapping[int, Any]
    ) -> None:
        """Update all, also what is empty, as on the host."""
        given = zip(self._parameters, gradients, self._slots, steps, strict=True)
        for position, (parameter, gradient, slots, step) in enumerate(given):
            flat = cupy.ascontiguousarray(gradient, gradient.dtype).reshape(-1)
            if position in shrinkages:  # the step's factor stays a number of the host, which users' rules read
                kind = wire_dtype(parameter.dtype)
                flat = cupy.multiply(flat, shrinkages[position], dtype=kind, casting="unsafe")
            rule.update(parameter, flat, slots, step)

    def _shrinkages(self, verdict: Any, is_each: bool) -> dict[int, Any]:
        """Return what gradients are multiplied by, on the device, by their positions."""
        members = [each for part in self._parts for each in part.members]
        return {member: verdict[1 + number * is_each] for number, member in enumerate(members)}

    def _verdict(self, tables: Sequence[tuple[_Part, Any, Any]], limits: Limits) -> Any:
        """Return what judge.cu makes of gradients."""
        spans, found = self._spans_of(limits.is_each), cupy.empty(2 * self._blocks)
        squares, faults = found.data.ptr, found.data.ptr + self._blocks * _DOUBLE
        for part, table, own in tables:
            before = part.before * _DOUBLE
            given = table, numpy.int32(table.shape[1]), numpy.int32(len(own)), squares + before, faults + before
            _measure_kernel(own[0].dtype)((part.blocks,), (THREADS,), given)
        verdict = cupy.empty(len(spans))
        asked = numpy.float64(limits.factor), numpy.float64(limits.norm or 0), numpy.int32(limits.skips_nonfinite)
        _judge_kernel()((len(spans),), (THREADS,), (spans, squares, faults, *asked, verdict))
        return verdict

    def _spans_of(self, is_each: bool) -> Any:
        """Return the blocks of all gradients; then those of each, or again of all, whose norm is wanted."""
        if is_each not in self._spans:
            rows = [(0, self._blocks)]
            firsts = [part.before + first for part in self._parts for first in part.begins[:, 0].tolist()]
            rows += pairwise([*firsts, self._blocks]) if is_each else rows
            self._spans[is_each] = self._memory.table(numpy.array(rows, numpy.int64))
        return self._spans[is_each]

    def _answer(self, verdict: Any) -> Answer:
        flag = self._memory.host_buffer(1, verdict.dtype)
        return Answer(self._memory.read(verdict[:1], flag), flag)


def _launch(formula: Formula, tables: Sequence[tuple[_Part, Any, Any]], verdict: Any, is_each: bool) -> None:
    """Update the parameters of each part by one launch."""
    left_out = 0 if verdict is None else verdict.data.ptr
    shrinkages = 0 if verdict is None else left_out + _DOUBLE
    for part, table, own in tables:
        kernel = _update_kernel(formula, part.dtype, own[0].dtype)
        given = table, numpy.int32(len(own)), left_out, shrinkages, numpy.int32(is_each)
        kernel((part.blocks,), (THREADS,), given)
        shrinkages += len(own) * _DOUBLE if is_each else 0


def _table(part: _Part, gradients: Sequence[Any], numbers: Sequence[Sequence[float]]) -> tuple[Any, list[Any]]:
    """Return the table for update.cu, and the gradients, whose addresses are in it."""
    is_alike = all(gradients[each].dtype == part.dtype for each in part.members)
    kind = part.dtype if is_alike else wire_dtype(part.dtype)
    own = [cupy.ascontiguousarray(gradients[each], kind) for each in part.members]
    rows = numpy.array([numbers[each] for each in part.members] if len(numbers) > 1 else numbers, numpy.float64)
    bits = numpy.broadcast_to(rows.view(numpy.int64), (len(own), rows.shape[1]))
    at = numpy.array([each.data.ptr for each in own], numpy.int64)
    return cupy.asarray(numpy.column_stack([part.begins, at, bits, part.addresses])), own


def _copy(source: Any, target: Any, factor: float | None, dtype: Any) -> None:
    """Copy an array, multiplied in a dtype, by one launch."""
    if factor is None:
        target[...] = source
    else:
        cupy.multiply(source, factor, out=target, dtype=dtype, casting="unsafe")


@cache
def _move_kernel() -> Any:
    return cupy.RawKernel(Path(__file__).with_name("move.cu").read_text(), "move")


@cache
def _mark_kernel() -> Any:
    return cupy.RawKernel(Path(__file__).with_name("mark.cu").read_text(), "mark")


@cache
def _convert_kernel(apart: numpy.dtype, together: numpy.dtype, is_multiplied: bool) -> Any:
    return cupy.RawKernel(convert_text(apart, together, is_multiplied), "convert")


@cache
def _measure_kernel(gradient: numpy.dtype) -> Any:
    return cupy.RawKernel(measure_text(gradient), "measure")


@cache
def _judge_kernel() -> Any:
    return cupy.RawKernel(judge_text(), "judge")


@cache
def _update_kernel(formula: Formula, parameter: numpy.dtype, gradient: numpy.dtype) -> Any:
    """Return the kernel, which rounds as often as NumPy."""
    return cupy.RawKernel(update_text(formula, parameter, gradient), "update", ("--fmad=false",))
