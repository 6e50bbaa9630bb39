"""A pretended device: arrays whose content the host cannot reach, to prove that nobody copies it there unasked."""

from __future__ import annotations

import dataclasses
import pickle
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any
from zlib import crc32

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from mpidist import arrays
from mpidist.device import memory
from mpidist.device.answers import Answer, Limits
from mpidist.device.memory import Arrived, Link
from mpidist.runtime.watch import Watch
from mpidist.transports.base import Transport


class DeviceArray(NDArrayOperatorsMixin):
    """An array in pretended device memory; it refuses everything by which NumPy would get at its content.

    As CuPy's arrays it computes with arrays of its kind and with numbers, by operators, methods and NumPy's functions,
    and gives a number when it is asked for one (`item`, `float`, `tolist`).

    Parameters
    ----------
    hidden : numpy.ndarray
        The content.  Tests make device arrays with `on_device` and look into them with `mpidist.arrays.as_host`.
    base : DeviceArray, optional
        Of which it is a view, as CuPy's arrays have it: the one that has the memory.
    """

    def __init__(self, hidden: np.ndarray, base: DeviceArray | None = None) -> None:
        self._hidden = hidden
        self.base = base
        self.dtype, self.shape, self.size = hidden.dtype, hidden.shape, hidden.size
        self.itemsize, self.nbytes, self.ndim = hidden.itemsize, hidden.nbytes, hidden.ndim
        self.flags, self.strides = hidden.flags, hidden.strides

    def __array__(self, *args: Any, **kwargs: Any) -> np.ndarray:
        raise TypeError("this array is in device memory; something wanted to copy it to the host unasked")

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, out: Any = (), **options: Any) -> Any:
        hidden = getattr(ufunc, method)(
            *map(_inside, inputs), out=tuple(map(_inside, out)) or None, **_all_inside(options)
        )
        return out[0] if out else _outside(hidden)

    def __array_function__(self, function: Any, types: Any, given: Any, options: Any) -> Any:
        out = options.get("out")
        found = function(*_all_inside(given), **_all_inside(options))
        return _outside(found) if out is None else out

    def __iter__(self) -> Iterator[Any]:
        raise TypeError("this array is in device memory; something wanted to read it element by element")

    def __getitem__(self, key: Any) -> DeviceArray:
        return self._view(np.asarray(self._hidden[_all_inside(key)]))

    def _view(self, hidden: np.ndarray) -> DeviceArray:
        return DeviceArray(hidden, self if self.base is None else self.base)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._hidden[_all_inside(key)] = _inside(value)

    def __len__(self) -> int:
        return len(self._hidden)

    def __float__(self) -> float:
        return float(self._hidden)

    def __int__(self) -> int:
        return int(self._hidden)

    def __bool__(self) -> bool:
        return bool(self._hidden)

    def item(self) -> Any:
        """Return the only element as a number of Python's."""
        return self._hidden.item()

    def tolist(self) -> Any:
        """Return the elements as numbers of Python's."""
        return self._hidden.tolist()

    def reshape(self, *shape: Any) -> DeviceArray:
        """Return the array with another shape."""
        return self._view(self._hidden.reshape(*shape))

    def transpose(self, *axes: Any) -> DeviceArray:
        """Return the array with its axes in another order."""
        return self._view(self._hidden.transpose(*axes))

    def view(self, *dtype: Any) -> DeviceArray:
        """Return the same memory, by default as values of the same dtype."""
        return self._view(self._hidden.view(*dtype))

    def copy(self) -> DeviceArray:
        """Return a copy, on the device."""
        return DeviceArray(self._hidden.copy())

    def astype(self, dtype: Any, order: str = "K", copy: bool = True) -> DeviceArray:
        """Return a copy as another dtype, on the device; the array itself where none is needed and asked for."""
        hidden = self._hidden.astype(dtype, order=order, copy=copy)  # type: ignore[call-overload]
        return self if hidden is self._hidden else DeviceArray(hidden)

    def sum(self, axis: Any = None, dtype: Any = None) -> DeviceArray:
        """Return the sum over axes."""
        return DeviceArray(np.asarray(self._hidden.sum(axis=axis, dtype=dtype)))

    def min(self) -> DeviceArray:
        """Return the least element."""
        return DeviceArray(np.asarray(self._hidden.min()))

    def max(self) -> DeviceArray:
        """Return the greatest element."""
        return DeviceArray(np.asarray(self._hidden.max()))

    def all(self) -> DeviceArray:
        """Return whether all elements are true."""
        return DeviceArray(np.asarray(self._hidden.all()))

    @property
    def T(self) -> DeviceArray:  # noqa: N802 - numpy's name
        """The array with its axes reversed."""
        return self._view(self._hidden.T)


def _inside(value: Any) -> Any:
    """Return the hidden content of a device array; numbers travel with a kernel, host arrays do not."""
    if isinstance(value, DeviceArray):
        return value._hidden
    if isinstance(value, (bool, int, float, complex, np.generic)):
        return value
    raise TypeError(f"expected an array in device memory, got {type(value).__name__}")


def _all_inside(value: Any) -> Any:
    """Return arguments with the hidden contents of device arrays; TypeError for host arrays among them."""
    if isinstance(value, (list, tuple)):
        return type(value)(map(_all_inside, value))
    if isinstance(value, dict):
        return {key: _all_inside(each) for key, each in value.items()}
    return _inside(value) if isinstance(value, (DeviceArray, np.ndarray)) else value


def _outside(value: Any) -> Any:
    """Return what a function of NumPy's gave as arrays in device memory."""
    if isinstance(value, (list, tuple)):
        return type(value)(map(_outside, value))
    return DeviceArray(np.asarray(value)) if isinstance(value, (np.ndarray, np.generic)) else value


class _Namespace:
    """The pretended library: NumPy's functions, which make device arrays and take no others."""

    def __getattr__(self, name: str) -> Any:
        function = getattr(np, name)
        if not callable(function):
            return function

        def on_the_device(*given: Any, out: Any = None, **options: Any) -> Any:
            if out is not None:
                options["out"] = out
            found = function(*_all_inside(given), **_all_inside(options))
            return _outside(found) if out is None else out

        return on_the_device


def on_device(array: Any) -> DeviceArray:
    """Return a copy of a host array in pretended device memory."""
    return DeviceArray(np.array(array, order="C"))


class PretendedMemory:
    """The pretended memory, for collectives: copies happen only when they are asked for a second time.

    Parameters
    ----------
    why_no_link : str
        Why ranks have no collectives of the device's own; empty if they have: pretended ones.
    """

    has_streams = True

    def __init__(self, why_no_link: str = "the device is a pretended one") -> None:
        self._why_no_link = why_no_link

    def enter(self, tensors: Sequence[Any]) -> None:
        """Begin work on some arrays."""
        for each in tensors:
            _inside(each)

    def host_buffer(self, elements: int, dtype: Any) -> np.ndarray:
        """Return host memory."""
        return np.full(elements * np.dtype(dtype).itemsize, 0xAA, np.uint8).view(dtype)

    def read(self, source: DeviceArray, target: np.ndarray) -> Arrived:
        """Begin to copy a device array into host memory."""
        _check_alike(source, target)
        return _later(lambda: np.copyto(target, source._hidden.copy()))

    def write(self, source: np.ndarray, target: DeviceArray) -> Arrived:
        """Begin to copy host memory into a device array: it is there for who reads it there, not yet for the host."""
        _check_alike(target, source)
        target._hidden[...] = source
        before = source.copy()

        def check() -> None:
            assert source.tobytes() == before.tobytes(), "host memory was written to while the device was reading it"

        return _later(check)

    def kept(self, array: Any) -> Any:
        """Return the array: there are no streams."""
        return array

    def trim(self) -> None:
        """Do nothing: memory is the host's."""

    def own_stream(self) -> PretendedStream:
        """Return a stream beside others."""
        return PretendedStream()

    def packing(self, offsets: Sequence[int]) -> PretendedPacking:
        """Return the packing of tensors."""
        return PretendedPacking(offsets)

    def spans(self, tensors: Sequence[Any]) -> list[tuple[int, int]]:
        """Return address and bytes of each array."""
        return [(each._hidden.__array_interface__["data"][0], each.nbytes) for each in tensors]

    def joint_update(self, parameters: Sequence[Any], slots: Sequence[Sequence[Any]]) -> PretendedUpdate:
        """Return the update of parameters, each with its slots."""
        return PretendedUpdate(parameters, slots)

    def link(self, transport: Transport, watch: Watch) -> Link | str:
        """Return pretended collectives between these ranks, or why there are none."""
        transport.exchange(b"", watch)
        return self._why_no_link or PretendedLink(transport)


class PretendedStream:
    """A stream in which links work when somebody is ordered behind it."""

    def __init__(self) -> None:
        self.begun: list[Callable[[], None]] = []

    def begin(self, fn: Callable[[], None]) -> None:
        """Call what begins work."""
        _current.stream = self
        try:
            fn()
        finally:
            _current.stream = None

    def end(self) -> None:
        """Do all the work."""
        begun, self.begun = self.begun, []
        for fn in begun:
            fn()

    def arrival(self) -> Arrived:
        """Return what says that it is done."""
        return lambda: True


class _Current(threading.local):
    """The stream in which a thread begins work; None for the only one that is not pretended."""

    stream: PretendedStream | None = None


_current = _Current()


class PretendedPacking:
    """How tensors lie one after the other in a flat array; not those of which a kernel would read other bytes."""

    def __init__(self, offsets: Sequence[int]) -> None:
        self._spans = list(pairwise(offsets))

    def _check(self, tensors: Sequence[Any]) -> None:
        assert all(each.flags.c_contiguous for each in tensors), "a kernel copies the memory of an array as it lies"
        assert len({each.dtype for each in tensors}) <= 1, "a kernel copies arrays of one dtype"

    def pack(self, tensors: Sequence[Any], flat: DeviceArray, factor: float | None = None) -> None:
        """Copy tensors into the flat array, multiplied."""
        self._check(tensors)
        for each, (start, stop) in zip(tensors, self._spans, strict=True):
            flat[start:stop] = each.reshape(-1)
        if factor is not None:
            np.multiply(flat._hidden, factor, out=flat._hidden)

    def unpack(self, flat: DeviceArray, tensors: Sequence[Any], factor: float | None = None) -> None:
        """Copy the flat array into tensors, multiplied."""
        self._check(tensors)
        if factor is not None:
            np.multiply(flat._hidden, factor, out=flat._hidden)
        for each, (start, stop) in zip(tensors, self._spans, strict=True):
            each.reshape(-1)[...] = flat[start:stop]

    def mark(self, tensors: Sequence[Any], target: DeviceArray) -> None:
        """Write a number that stands for their bytes."""
        self._check(tensors)
        target._hidden[...] = crc32(b"".join(each._hidden.tobytes() for each in tensors))


class PretendedUpdate:
    """The steps of an optimizer for some parameters, one by one."""

    def __init__(self, parameters: Sequence[DeviceArray], slots: Sequence[Sequence[DeviceArray]]) -> None:
        self._given = list(zip(parameters, slots, strict=True))

    def run(
        self, rule: Any, gradients: Sequence[DeviceArray], steps: Sequence[Any], limits: Limits | None = None
    ) -> Answer | None:
        """Update parameters and slots, within limits; the answer arrives when it is asked for a second time.

        A rule without a formula waits for it.
        """
        shrinkages, is_left_out = [1.0] * len(gradients), False
        if limits is not None:
            inside = [each._hidden.astype("f8") for each in gradients]
            is_left_out = limits.skips_nonfinite and not all(np.isfinite(each).all() for each in inside)
            shrinkages = _shrinkages(inside, limits)
        answer = None
        if limits is not None and limits.skips_nonfinite:
            flag = np.full(1, np.nan)
            answer = Answer(_later(lambda: flag.fill(is_left_out)), flag)
            if not rule.has_formula:
                answer()
        for (parameter, slots), gradient, step, own in zip(self._given, gradients, steps, shrinkages, strict=True):
            flat: Any = gradient.reshape(-1)
            if rule.has_formula:
                step = dataclasses.replace(step, factor=step.factor * own)
            else:
                flat = np.multiply(flat, own, dtype=arrays.wire_dtype(parameter.dtype), casting="unsafe")
            if not is_left_out:
                rule.update(parameter, flat, slots, step)
        return answer


def _shrinkages(gradients: Sequence[np.ndarray], limits: Limits) -> list[float]:
    """Return what gradients are to be multiplied by for the limit of their norms."""
    if limits.norm is None:
        return [1.0] * len(gradients)
    squares = np.array([np.square(each).sum() for each in gradients]) * limits.factor**2
    norms = np.sqrt(squares if limits.is_each else np.full_like(squares, squares.sum()))
    found: list[float] = np.where(np.isfinite(norms), limits.norm / np.maximum(norms, limits.norm), np.nan).tolist()
    return found


class PretendedLink:
    """Collectives between pretended devices, by messages; they know no complex numbers.  `calls` has their names."""

    name = "pretended collectives"

    def __init__(self, transport: Transport) -> None:
        self._transport, self.control = transport, transport.control
        self.calls: list[str] = []
        self.left: Arrived | None = None
        self.is_closed = False

    def can_reduce(self, dtype: np.dtype, op: str) -> bool:
        """Return whether there is such a reduction."""
        return dtype.kind != "c"

    def look(self) -> None:
        """Do nothing: what was begun is done."""

    def is_done(self) -> bool:
        """Return True."""
        return True

    def reduce(self, buffer: DeviceArray, op: str, watch: Watch) -> None:
        """Reduce an array in place; in another stream later."""
        if _current.stream is None:
            self._reduce(buffer, op, watch)
        else:
            _current.stream.begun.append(partial(self._reduce, buffer, op, watch))

    def _reduce(self, buffer: DeviceArray, op: str, watch: Watch) -> None:
        self._agree("reduce", watch, buffer, op)
        buffer._hidden[...] = self._reduced(buffer, op, watch)

    def reduce_parts(self, buffer: DeviceArray, op: str, bounds: Sequence[int], watch: Watch) -> None:
        """Reduce for each rank its part, in place; the rest is spoilt."""
        self._agree("reduce_parts", watch, buffer, op, *bounds)
        own, found = slice(*bounds[self._transport.rank :][:2]), self._reduced(buffer, op, watch)
        buffer._hidden.view(np.uint8)[...] = 0xAA
        buffer._hidden[own] = found[own]

    def from_root(self, buffer: DeviceArray, root: int, watch: Watch) -> None:
        """Give all ranks the array of rank `root`, in place."""
        self._agree("from_root", watch, buffer, root)
        is_root = self._transport.rank == root
        raw = self._transport.exchange(buffer._hidden.tobytes() if is_root else b"", watch)[root]
        buffer._hidden[...] = np.frombuffer(raw, buffer.dtype)

    def gather(self, joined: DeviceArray, bounds: Sequence[int], watch: Watch) -> None:
        """Give all ranks the parts of all, where each has put its own."""
        self._agree("gather", watch, joined, *bounds)
        assert (bounds[0], bounds[-1]) == (0, joined.size), "the parts are not the array"
        own = joined._hidden[slice(*bounds[self._transport.rank :][:2])]
        joined._hidden[...] = np.frombuffer(b"".join(self._transport.exchange(own.tobytes(), watch)), joined.dtype)

    def exchange(self, gives: Mapping[int, DeviceArray], places: Mapping[int, DeviceArray], watch: Watch) -> None:
        """Give other ranks arrays, and write into `places` what they give."""
        self._agree("exchange", watch)
        assert all(each.flags.c_contiguous for each in [*gives.values(), *places.values()])
        given = pickle.dumps({rank: each._hidden.tobytes() for rank, each in gives.items()})
        raws = self._transport.exchange(given, watch)
        sent = {giver: pickle.loads(raw).get(self._transport.rank, b"") for giver, raw in enumerate(raws)}
        lengths = {giver: len(raw) for giver, raw in sent.items() if raw}
        expected = {giver: place.nbytes for giver, place in places.items() if place.nbytes}
        assert lengths == expected, f"ranks sent {lengths} bytes, {expected} were expected"
        for giver in expected:
            place = places[giver]
            place._hidden[...] = np.frombuffer(sent[giver], place.dtype).reshape(place.shape)

    def _agree(self, name: str, watch: Watch, buffer: DeviceArray | None = None, *given: Any) -> None:
        """Take note of a call; fail unless all ranks make it alike: NCCL would hang, or move other bytes."""
        self.calls.append(name)
        assert not self.is_closed
        assert buffer is None or (buffer.ndim == 1 and buffer.flags.c_contiguous)
        call = [name, *given, *([] if buffer is None else [buffer.dtype, buffer.size])]
        calls = self._transport.exchange(repr(call).encode(), watch)
        assert len(set(calls)) == 1, f"ranks make different calls of a link: {calls}"

    def _reduced(self, buffer: DeviceArray, op: str, watch: Watch) -> np.ndarray:
        raws = self._transport.exchange(buffer._hidden.tobytes(), watch)
        reduce: Any = arrays.reduction(op, np)
        found: np.ndarray = reduce.reduce([np.frombuffer(raw, buffer.dtype) for raw in raws])
        return found

    def close(self, in_order: bool) -> None:
        """Give back what it holds."""
        self.is_closed = True


def _check_alike(array: DeviceArray, host: np.ndarray) -> None:
    """Fail where CuPy would: it neither converts nor cuts what it copies."""
    assert (array.dtype, array.shape) == (host.dtype, host.shape)
    assert array.flags.c_contiguous and host.flags.c_contiguous


def _later(fn: Callable[[], None]) -> Arrived:
    """Return what does something at its second call, and says from then on that it is done."""
    turns: list[int] = []

    def arrived() -> bool:
        turns.append(1)
        if len(turns) == 2:
            fn()
        return len(turns) >= 2

    return arrived


#: The blocks that are open: ranks that are threads have one each, and the last one to leave takes the device along.
_blocks: list[arrays.ArrayKind] = []
_blocks_lock = threading.Lock()


@contextmanager
def pretended_device(why_no_link: str = "the device is a pretended one") -> Iterator[None]:
    """Make `DeviceArray` known to `mpidist.arrays` inside the block; parameters as for `PretendedMemory`."""
    library = _Namespace()
    kind = arrays.ArrayKind(
        "pretended",
        "device",
        lambda value: isinstance(value, DeviceArray),
        lambda: library,
        lambda array: array._hidden.copy(),
        on_device,
    )
    with _blocks_lock:
        _blocks.append(kind)
        arrays.register(kind)
        memory.register(kind.name, PretendedMemory(why_no_link))
    try:
        yield
    finally:
        with _blocks_lock:
            _blocks.remove(kind)
            if not _blocks:
                arrays.unregister(kind.name)
                memory.unregister(kind.name)
