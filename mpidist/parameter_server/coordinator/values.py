"""What the chief holds in place of a value that is on a worker: `RemoteValue`, and `PerWorkerValues` of all workers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from mpidist.parameter_server.coordinator.functions import Function, NotAnArgument
from mpidist.parameter_server.coordinator.packed import PackedValue, unpacked

if TYPE_CHECKING:
    from mpidist.parameter_server.coordinator.calls import Calls

#: What a `RemoteValue` has before its function has run.
PENDING: Any = object()

_PACKED = (bytes, PackedValue)

_OUTSIDE = (
    "Cannot retrieve the worker index. `experimental_get_current_worker_index` should be called from a dataset "
    "function that is passed to `ClusterCoordinator.create_per_worker_dataset`, or from a function that is passed to "
    "`ClusterCoordinator.schedule`"
)


class Failed:
    """In place of what a function returns: it raised, or was cancelled."""

    __slots__ = ("error",)

    def __init__(self, error: BaseException) -> None:
        self.error = error


class RemoteValue:
    """The result, sooner or later, of a scheduled function.  Made by `ClusterCoordinator.schedule`.

    A result that is an array or anything else that could change is this process's own copy.
    """

    __slots__ = ("_calls", "_function", "_payload", "_result")

    def __init__(self, calls: Calls, function: Function | None, payload: Any) -> None:
        self._calls = calls
        self._function: Any = function
        self._payload = payload
        self._result = PENDING

    def fetch(self) -> Any:
        """Return the result, waiting for it.  Local.

        Raises
        ------
        Exception
            What the function raised.
        CancelledError
            It was not run, because one that was scheduled earlier failed.
        """
        if self._result is PENDING:
            self._calls.wait_for(self)
        result = self._result
        if type(result) is Failed:
            raise result.error
        if type(result) in _PACKED and self._function is not None:  # as the worker sent it
            self._result = result = unpacked(result)
            self._function = None  # a result that is bytes itself is not unpickled again
        return result

    get = fetch

    def __reduce__(self) -> NoReturn:
        raise NotAnArgument(
            "`tf.distribute.experimental.coordinator.RemoteValue` used as an input to scheduled function is not yet "
            "supported: pass its fetch()"
        )

    def __repr__(self) -> str:
        state = "pending" if self._result is PENDING else "failed" if type(self._result) is Failed else "done"
        return f"<RemoteValue, {state}>"


class PerWorkerValues:
    """A value for every worker: as an argument of a scheduled function, each worker gets its own.

    Parameters
    ----------
    values : sequence
        One a worker, in their order.
    """

    def __init__(self, values: Sequence[Any]) -> None:
        self._values = tuple(values)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return _component, (self._values,)


class PerWorkerIterator(PerWorkerValues):
    """An iterator on every worker; made by ``iter`` of what `ClusterCoordinator.create_per_worker_dataset` returned.

    All methods are Local.
    """

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return _made, (self.number,)

    def __iter__(self) -> PerWorkerIterator:
        return self

    def __next__(self) -> NoReturn:
        raise NotImplementedError(
            "Iterating over an `AsyncDistributedIterator` is not supported right now: pass it to a function that is "
            "given to `ClusterCoordinator.schedule`, and call next() there"
        )

    get_next = __next__


class PerWorkerDataset(PerWorkerIterator):
    """A data set on every worker; made by `ClusterCoordinator.create_per_worker_dataset`.

    Parameters
    ----------
    number : int
    iterate : callable
        Makes an iterator on every worker, and returns what stands for them.
    element_spec : nested ArraySpec, or None
        What its elements are like, where the chief knows.
    """

    def __init__(self, number: int, iterate: Callable[[int], PerWorkerIterator], element_spec: Any) -> None:
        super().__init__(number)
        self._iterate = iterate
        self.element_spec = element_spec

    def __iter__(self) -> PerWorkerIterator:
        return self._iterate(self.number)


# -- on a worker ------------------------------------------------------------------------------------------------------


class OnWorker(threading.local):
    """What a thread that runs scheduled functions knows of the worker that it is."""

    index: int | None = None
    count = 0
    made: Callable[[int], Any]


on_worker = OnWorker()


def experimental_get_current_worker_index() -> int:
    """Return the number of the worker that runs this function, from 0.  Local."""
    if on_worker.index is None:
        raise RuntimeError(_OUTSIDE)
    return on_worker.index


def _component(values: tuple[Any, ...]) -> Any:
    index = experimental_get_current_worker_index()
    if len(values) != on_worker.count:
        raise ValueError(f"PerWorkerValues has {len(values)} values for {on_worker.count} workers")
    return values[index]


def _made(number: int) -> Any:
    experimental_get_current_worker_index()  # raises outside
    return on_worker.made(number)
