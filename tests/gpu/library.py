"""The array library that the tests of this folder use: CuPy on a GPU, or NumPy with ``MPIDIST_TEST_ON=numpy``."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy
import pytest

import mpidist
from benchmarks.suite.gpu import spin
from mpidist.cluster.devices import gpu_of_rank


def is_numpy() -> bool:
    """Return whether the tests are to run on NumPy's arrays."""
    return os.environ.get("MPIDIST_TEST_ON") == "numpy"


def is_emulated() -> bool:
    """Return whether the tests are to run on CuPy's arrays on emulated GPUs."""
    return os.environ.get("MPIDIST_TEST_ON") == "emulated"


def missing() -> str:
    """Return why there is no GPU for CuPy here; empty where there is one."""
    try:
        import cupy

        count = cupy.cuda.runtime.getDeviceCount()
    except (ImportError, RuntimeError) as error:
        return f"no GPU for CuPy: {error}"
    return "" if count else "no GPU for CuPy: none is visible"


def require() -> None:
    """Skip the test where there is neither a GPU nor the wish to do without."""
    if not is_numpy() and (why := missing()):
        pytest.skip(f"{why}; MPIDIST_TEST_ON=numpy runs it on NumPy")


def library() -> Any:
    """Return cupy, on the GPU of this rank, or numpy; skip the test where there is neither."""
    require()
    if is_numpy():
        return numpy
    import cupy

    cupy.cuda.Device(gpu_of_rank(mpidist.local_rank(), cupy.cuda.runtime.getDeviceCount())).use()
    return cupy


def host(array: Any) -> numpy.ndarray:
    """Return a copy of an array in host memory; it waits for what is under way in the current stream."""
    if isinstance(array, (numpy.ndarray, numpy.generic, int, float)):
        return numpy.array(array)
    import cupy

    return cupy.asnumpy(array)


def is_own(xp: Any, array: Any) -> bool:
    """Return whether it is an array of the library, on this rank's device."""
    return isinstance(array, xp.ndarray) and (xp is numpy or array.device == xp.cuda.Device())


def place() -> tuple[int, int]:
    """Return rank and size."""
    return mpidist.rank(), mpidist.size()


@functools.cache
def strategy() -> mpidist.Strategy:
    """Return one strategy for all tests that need no new one."""
    return mpidist.MultiWorkerMirroredStrategy()


def in_replica(op: str, value: Any) -> Any:
    """Return a value reduced by the replica context inside `Strategy.run`.  Collective."""
    return strategy().run(lambda: mpidist.get_replica_context().all_reduce(op, value))


def check_on_all_ranks(problem: Any) -> None:
    """Fail on all ranks together, so that they stay in step: of each, what is wrong, or whether all is right."""
    told = "" if isinstance(problem, (bool, numpy.bool_)) and problem else str(problem)
    problems = {rank: text for rank, text in enumerate(mpidist.all_gather_object(told)) if text}
    assert not problems, problems


def problem_of(xp: Any, found: Any, expected: Any, rtol: float = 0.0, atol: float = 0.0) -> str:
    """Return what is wrong with an array; empty if it is the library's and equals `expected`, a NumPy array."""
    if not is_own(xp, found):
        return f"a {type(found).__module__}.{type(found).__name__} that is not this rank's"
    expected = numpy.asarray(expected)
    if found.dtype != expected.dtype or found.shape != expected.shape:
        return f"{found.dtype}{found.shape} in place of {expected.dtype}{expected.shape}"
    values = host(found)
    if numpy.array_equal(values, expected):
        return ""
    if values.dtype.kind not in "biuc":  # ml_dtypes' floats are not known to allclose
        values, expected = values.astype("f8"), expected.astype("f8")
    if numpy.allclose(values, expected, rtol, atol, equal_nan=True):
        return ""
    wrong = ~numpy.isclose(values, expected, rtol, atol, equal_nan=True)
    return f"{wrong.sum()} of {wrong.size} elements, first {values[wrong][0]} in place of {expected[wrong][0]}"


def problems_of(xp: Any, found: Any, expected: Any, **tolerance: float) -> str:
    """Return what is wrong with a list of arrays, by their numbers in it."""
    each = [problem_of(xp, *pair, **tolerance) for pair in zip(found, expected, strict=True)]
    return "; ".join(f"{number}: {text}" for number, text in enumerate(each) if text)


# -- streams ----------------------------------------------------------------------------------------------------------


@contextmanager
def stream(xp: Any) -> Iterator[None]:
    """Make another stream current, one that does not wait for the default stream nor that for it."""
    if xp is numpy:
        yield
        return
    with xp.cuda.Stream(non_blocking=True):
        yield


def two_streams(xp: Any) -> list[Any]:
    """Return two such streams, each current inside a ``with``."""
    return [nullcontext() if xp is numpy else xp.cuda.Stream(non_blocking=True) for _ in range(2)]


def slowly(xp: Any, array: Any, value: Any) -> None:
    """Fill an array in the current stream, behind work that takes the card a while; the host does not wait."""
    if xp is not numpy:
        spin(xp)
    array.fill(value)
