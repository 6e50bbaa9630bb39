"""What differs between NumPy and CuPy, where host memory begins, and nothing else.

Everything above calls functions of an array's *namespace* (the module that made it) and asks here for the few things
the two do not share.  Nothing here copies device memory to the host, except `as_host` and `on_host`, which say so.
Another kind of array joins by `register`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpidist.errors import MissingDependencyError, UnsupportedDtypeError

#: A cache line; and what JAX and PyTorch need for taking an array over as it is.
ALIGNMENT = 64

#: Reductions by name, each with the name of the binary ufunc that every namespace has for it.
REDUCTIONS = {"sum": "add", "min": "minimum", "max": "maximum", "prod": "multiply"}

#: Floats too short to be added as such: by name, because ml_dtypes (bfloat16) may not be there.
_SHORT_FLOATS = frozenset({"float16", "bfloat16"})

#: What can be done with values, by kind of dtype: with numbers, complex numbers (which have no order), truth values,
#: and what is only *moved*, that is gathered and broadcast: times, text, bytes and records.  Kinds that are not here
#: refer to objects of one process.  Of other libraries' dtypes, only `_SHORT_FLOATS` are reduced.
_REDUCTIONS_OF_KIND = {
    **dict.fromkeys("iuf", ("sum", "min", "max", "prod")),
    "c": ("sum", "prod"),
    "b": ("min", "max"),
    **dict.fromkeys("mMSUV", ()),
}

#: The cure where there is no CuPy.
GET_CUPY = (
    "pip install cupy-cuda13x nvidia-nccl-cu13, or in a checkout of mpidist pip install -e '.[cuda13]'; "
    "with a driver for CUDA 12, cuda12x, cu12 and cuda12 in their place"
)

#: The cure where CuPy is there, and shows no GPU.
_GET_GPU = (
    "CuPy is installed; start it where nvidia-smi shows a GPU and a driver for CuPy's version of CUDA, and where "
    "CUDA_VISIBLE_DEVICES does not hide the GPU"
)

#: DLPack's numbers of the devices whose memory the host cannot read: CUDA, CUDA managed, ROCm.
_DLPACK_DEVICES = frozenset({2, 13, 10})


@dataclass(frozen=True)
class ArrayKind:
    """One library's arrays."""

    name: str  # ``"numpy"``, ``"cupy"``,
    memory: str  # where the arrays lie: ``"host"`` or ``"device"``
    owns: Callable[[Any], bool]  # ``owns(value)``: whether the value is such an array.  It must not import the library
    # ``namespace()``: the library, with the functions of numpy that are used here (`empty`, `add`, ...)
    namespace: Callable[[], Any]
    to_host: Callable[[Any], np.ndarray]  # ``to_host(array)``: a copy as a numpy array
    from_host: Callable[[np.ndarray], Any]  # ``from_host(array)``: such an array with the values of a numpy array


def _is_cupy(value: Any) -> bool:
    cupy = sys.modules.get("cupy")
    return cupy is not None and isinstance(value, cupy.ndarray)


def _cupy() -> Any:
    try:
        import cupy
    except ImportError as error:
        raise MissingDependencyError(f"arrays in GPU memory need CuPy: {GET_CUPY} ({error})") from error
    return cupy


_KINDS: dict[str, ArrayKind] = {
    "numpy": ArrayKind("numpy", "host", lambda value: isinstance(value, np.ndarray), lambda: np, np.array, np.asarray),
    "cupy": ArrayKind(
        "cupy",
        "device",
        _is_cupy,
        _cupy,
        lambda array: _cupy().asnumpy(array),
        lambda array: _cupy().asarray(array),
    ),
}


def register(kind: ArrayKind) -> None:
    """Make another library's arrays known; Local.  A second kind of the same name replaces the first."""
    _KINDS[kind.name] = kind


def unregister(name: str) -> None:
    """Forget a kind of array that was registered; Local."""
    del _KINDS[name]


def _find_kind(value: Any) -> ArrayKind | None:
    return next((kind for kind in _KINDS.values() if kind.owns(value)), None)


def is_known(value: Any) -> bool:
    """Return whether `value` is an array of a known kind.  Local."""
    return _find_kind(value) is not None


def kind_of(array: Any) -> ArrayKind:
    """Return the kind of `array`; TypeError when it is none of the known ones."""
    kind = _find_kind(array)
    if kind is None:
        known = ", ".join(_KINDS)
        raise TypeError(f"expected an array of {known}, got {type(array).__name__}; convert it with arrays.to_array")
    return kind


def namespace(array: Any) -> Any:
    """Return the module whose functions work on `array`: numpy or cupy."""
    return np if isinstance(array, np.ndarray) else kind_of(array).namespace()


def is_device(array: Any) -> bool:
    """Return whether `array` lies in memory that the host cannot read."""
    return not isinstance(array, np.ndarray) and kind_of(array).memory == "device"


def check_memory(array: Any, memory: frozenset[str], transport: str) -> None:
    """Raise UnsupportedDtypeError unless a transport that moves these kinds of `memory` can move `array`."""
    if isinstance(array, np.ndarray) and "host" in memory:
        return
    kind = kind_of(array)
    if kind.memory not in memory:
        raise UnsupportedDtypeError(
            f"the {transport} transport moves {' and '.join(sorted(memory))} memory, got a {kind.name} array in "
            f"{kind.memory} memory. Copy it yourself (mpidist.arrays.as_host) or use a transport for "
            f"{kind.memory} memory; mpidist does not copy it unasked"
        )


# -- making arrays -----------------------------------------------------------------------------------------------------


def to_array(value: Any) -> Any:
    """Return `value` as an array of a known kind; Local.

    Known arrays are returned as they are, or as `plain` has them.  Memory of a CUDA device
    (``__cuda_array_interface__``, DLPack) becomes a CuPy array without a copy; anything else, Python numbers and lists
    included, a NumPy array, without a copy where NumPy can do without.  What a library computes later (JAX) is waited
    for.  Of a tensor that needs a gradient (PyTorch) it is the numbers, as of ``tensor.detach()``.  A value in device
    memory without CuPy is a MissingDependencyError.  A list that has an array in device memory is a TypeError; so is an
    array that means more than its numbers, see `plain`.
    """
    if is_known(value):
        return plain(value)
    if getattr(value, "requires_grad", False):
        value = value.detach()
    if hasattr(value, "__cuda_array_interface__"):
        return _cupy().asarray(value)
    if hasattr(value, "__dlpack_device__"):
        if value.__dlpack_device__()[0] in _DLPACK_DEVICES:
            return _cupy().from_dlpack(value)
        if not hasattr(value, "__array__"):
            return np.from_dlpack(value)
    if isinstance(value, (list, tuple)):
        kind = next((type(each) for each in value if hasattr(plain(each), "__cuda_array_interface__")), None)
        if kind is not None:
            raise TypeError(
                f"expected one array, got a {type(value).__name__} with a {kind.__module__}.{kind.__name__} in GPU "
                "memory; make one array there, as by cupy.stack"
            )
    return np.asarray(value)


def is_foreign(value: Any) -> bool:
    """Return whether `value` is another library's array, which `to_array` makes one of a known kind.  Local."""
    return (hasattr(value, "__array__") or hasattr(value, "__dlpack__")) and not is_known(value)


def plain(array: Any) -> Any:
    """Return an array of a subclass of NumPy's as one of NumPy's own, without a copy; any other as it is.  Local."""
    if type(array) is np.ndarray or not isinstance(array, np.ndarray):
        return array
    if np.ma.getmask(array) is not np.ma.nomask:
        raise TypeError(
            "got a masked array, whose mask would be lost: pass `.filled(value)`, or `.data` if what is masked counts"
        )
    if type(array).__array_ufunc__ is not np.ndarray.__array_ufunc__:
        raise TypeError(
            f"got a {type(array).__name__}, an array with an arithmetic of its own, which would be lost; pass "
            "numpy.asarray(array) if its numbers alone are meant"
        )
    return np.asarray(array)


def empty(shape: int | Sequence[int], dtype: Any, like: Any) -> Any:
    """Return a new uninitialised array of the kind of `like`."""
    return namespace(like).empty(shape, dtype=dtype)


def aligned(size: int, dtype: Any) -> Any:
    """Return a flat NumPy array that begins at a multiple of `ALIGNMENT`, with anything in it.  Local."""
    nbytes = size * np.dtype(dtype).itemsize
    raw = np.empty(nbytes + ALIGNMENT, np.uint8)
    first = -raw.__array_interface__["data"][0] % ALIGNMENT
    return raw[first : first + nbytes].view(dtype)


def in_memory_of(target: Any, array: Any) -> Any:
    """Return `array` in the kind of memory of `target`, as it is if it is there already; Local."""
    if type(array) is type(target):
        return array
    return kind_of(target).from_host(as_host(array) if is_known(array) and is_device(array) else np.asarray(array))


def empty_like(array: Any) -> Any:
    """Return a new uninitialised C-contiguous array of the kind, shape and dtype of `array`."""
    return empty(array.shape, array.dtype, array)


def flat_view(array: Any) -> Any:
    """Return a 1-d view of a contiguous array, in memory order; ValueError when it is not contiguous."""
    if array.flags.c_contiguous:
        return array.reshape(-1)
    if array.flags.f_contiguous:
        return array.T.reshape(-1)
    raise ValueError(
        f"expected a contiguous array, got shape {array.shape} with strides {array.strides}; "
        "pass a contiguous copy (numpy.ascontiguousarray)"
    )


def byte_view(array: Any) -> Any:
    """Return a 1-d view of the bytes of a C-contiguous array."""
    check_movable(array.dtype)
    if not array.flags.c_contiguous:
        raise ValueError(f"expected a C-contiguous array, got shape {array.shape} with strides {array.strides}")
    return array.reshape(-1).view(np.uint8)


#: Each is called with an array before it is copied from device memory, which waits for the device.
before_copies: list[Callable[[Any], object]] = []


def as_host(array: Any) -> np.ndarray:
    """Return a copy of `array` in host memory; the one place where device memory is copied there."""
    kind = kind_of(array)
    for each in before_copies if kind.memory == "device" else ():
        each(array)
    return kind.to_host(array)


def number(value: Any) -> Any:
    """Return a number of Python's or NumPy's as it is, and one that lies on a device from there; waits as `as_host`."""
    return as_host(value)[()] if is_known(value) else value


def on_host(array: Any) -> Any:
    """Return `array` in host memory, as it is if it is there already.  Local."""
    return as_host(array) if is_device(array) else array


# -- reductions --------------------------------------------------------------------------------------------------------


def wire_dtype(dtype: Any) -> np.dtype:
    """Return the dtype in which values of `dtype` are summed and sent: float32 for 16-bit floats, else its own."""
    dtype = np.dtype(dtype)
    if dtype.name in _SHORT_FLOATS:
        return np.dtype(np.float32)
    return dtype if dtype.isnative else dtype.newbyteorder("=")


def reduction_dtypes(dtype: Any, op: str) -> tuple[np.dtype, np.dtype]:
    """Return in which dtype values are reduced, and given back: the mean of integers is a float64.  Local."""
    dtype = np.dtype(dtype)
    if op == "mean" and dtype.kind in "iu":
        return np.dtype(np.float64), np.dtype(np.float64)
    return wire_dtype(dtype), dtype


def has_numbers(dtype: Any) -> bool:
    """Return whether values of a dtype are numbers or truth values, those of ml_dtypes included."""
    return dtype.kind in "biufc" or (dtype.kind == "V" and not issubclass(dtype.type, np.void))


def keeps_meaning(dtype: Any, target: Any) -> bool:
    """Return whether values of a dtype are numbers that mean the same, but for rounding, as `target`.  Local."""
    return has_numbers(dtype) and (dtype.kind != "c" or np.dtype(target).kind == "c")


def check_movable(dtype: Any) -> None:
    """Raise UnsupportedDtypeError if values of `dtype` mean nothing on another rank, whatever is done with them."""
    dtype = np.dtype(dtype)
    if dtype.hasobject or dtype.kind not in _REDUCTIONS_OF_KIND or not dtype.itemsize:
        raise UnsupportedDtypeError(
            f"{dtype} arrays cannot be sent to other ranks: expected numbers, truth values, times, text or bytes of "
            "fixed length, or records of them; convert first, as by array.astype('float32') or array.astype('U20')"
        )


def check_reducible(dtype: Any, op: str) -> None:
    """Raise unless values of `dtype` can be reduced by `op`, 16-bit floats by way of their `wire_dtype`."""
    if op not in REDUCTIONS:
        raise ValueError(f"{op!r} is not a reduction; known ones: {', '.join(REDUCTIONS)}")
    dtype = np.dtype(dtype)
    wire = wire_dtype(dtype)
    if wire.isbuiltin == 2:  # of another library: its arithmetic rounds to 8 bits or fewer in every step
        raise UnsupportedDtypeError(
            f"there is no reduction {op!r} of {dtype} arrays; cast them first, as by array.astype('float32')"
        )
    allowed = _REDUCTIONS_OF_KIND.get(wire.kind, ())
    if op not in allowed:
        has = f"it has {', '.join(allowed)}" if allowed else "it has none; expected numbers"
        raise UnsupportedDtypeError(f"there is no reduction {op!r} of {dtype} arrays: {has}")


def reduction(op: str, library: Any) -> Callable[..., Any]:
    """Return the function ``f(a, b, out=array)`` of the namespace `library` that reduces two arrays into `out`."""
    if op not in REDUCTIONS:
        raise ValueError(f"{op!r} is not a reduction; known ones: {', '.join(REDUCTIONS)}")
    return getattr(library, REDUCTIONS[op])


def sums_of_runs(values: Any, starts: Any) -> Any:
    """Return the sums of the rows from each start to the next, as a new array; `values` are written over.  Local.

    `starts`, in host memory, are ascending, the first one 0.
    """
    if isinstance(values, np.ndarray):
        return np.add.reduceat(values, starts, axis=0, dtype=values.dtype)
    # CuPy's `reduceat` subtracts sums of all rows so far: a large or infinite row spoils those behind it
    asarray, lengths = namespace(values).asarray, np.diff(starts, append=len(values))
    place = np.arange(len(values)) - np.repeat(starts, lengths)
    left, distance = np.repeat(lengths, lengths) - place, 1
    while distance < lengths.max(initial=0):
        into = np.flatnonzero((place % (2 * distance) == 0) & (left > distance))
        values[asarray(into)] += values[asarray(into + distance)]
        distance *= 2
    return values[asarray(starts)]


def summed_rows(values: Any, indices: np.ndarray) -> tuple[Any, np.ndarray]:
    """Return rows as new ones that are named once, in ascending order, with the sums of those named twice.  Local.

    `indices` are in host memory.  16-bit floats are summed in float32.
    """
    order = np.argsort(indices, kind="stable")
    ordered = indices[order]
    starts = np.flatnonzero(np.append(True, ordered[1:] != ordered[:-1])[: ordered.size])
    values = values[in_memory_of(values, order)]
    if starts.size < order.size:
        wide = values.astype(wire_dtype(values.dtype), copy=False)
        values = sums_of_runs(wide, starts).astype(values.dtype, copy=False)
    return values, ordered[starts]


def change_rows(array: Any, indices: Any, values: Any, function: Any) -> None:
    """Change row ``indices[i]`` by a ufunc of it and ``values[i]``, one named twice twice; None sets it.  Local.

    Rows are changed in order, of several for one the last is last.  `indices` are in any memory.
    """
    numbers = on_host(indices)
    if isinstance(array, np.ndarray):
        if function is None:
            array[numbers] = values
        else:
            function.at(array, numbers, values)
        return
    # CuPy writes rows that are named twice in any order, and its `ufunc.at` knows few functions and dtypes
    if function in (np.add, np.subtract):
        values, numbers = summed_rows(values, numbers)
    order = np.argsort(numbers, kind="stable")
    _, firsts, counts = np.unique(numbers[order], return_index=True, return_counts=True)
    if function is None:
        turns = [order[firsts + counts - 1]]
    else:
        turns = [order[firsts[counts > turn] + turn] for turn in range(counts.max(initial=0))]
    for turn in turns:
        where, given = in_memory_of(array, numbers[turn]), values[in_memory_of(array, turn)]
        array[where] = given if function is None else function(array[where], given)


# -- devices -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PhysicalDevice:
    """A device of this machine as TensorFlow's ``tf.config`` shows it.

    Attributes
    ----------
    name : str
        ``"/physical_device:GPU:0"``
    device_type : str
        ``"CPU"`` or ``"GPU"``
    """

    name: str
    device_type: str


def list_physical_devices(device_type: str | None = None) -> list[PhysicalDevice]:
    """Return the devices this process can see, of one type (``"CPU"``, ``"GPU"``, in any case) or of all; Local.

    A type that is not known has no devices.  Without CuPy, or without a driver, there are no GPUs.
    """
    wanted = None if device_type is None else device_type.upper()
    counts = {"CPU": lambda: 1, "GPU": lambda: _gpus()[0]}
    return [
        PhysicalDevice(f"/physical_device:{kind}:{index}", kind)
        for kind, count in counts.items()
        if wanted in (None, kind)
        for index in range(count())
    ]


def gpu_problem() -> tuple[str, str]:
    """Return why CuPy sees no GPU here, and what to do about it; empty where it sees one.  Local."""
    return _gpus()[1:]


def _gpus() -> tuple[int, str, str]:
    """Return how many GPUs CuPy sees, why none, and the cure; its errors of a missing driver are RuntimeErrors."""
    try:
        count = int(_cupy().cuda.runtime.getDeviceCount())
    except ImportError as error:
        return 0, _text_of(error.__cause__ or error), f"{GET_CUPY}, on a machine with a GPU"  # without the cure
    except RuntimeError as error:
        return 0, _text_of(error), _GET_GPU
    return (count, "", "") if count else (0, "none is visible", _GET_GPU)


def _text_of(error: BaseException) -> str:
    """Return an error's class and text; a variable would keep it, and by its traceback all that the callers have."""
    return f"{type(error).__name__}: {error}"
