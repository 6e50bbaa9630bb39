"""`GroupClient`: the client of a worker that is several ranks: the first speaks with the servers, for all of them.

At the start of each step all ranks get the same snapshot, in one broadcast, so that they work on the same values.  The
memory of the snapshot is each rank's own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy

from mpidist import context
from mpidist.collectives.communicator import Communicator
from mpidist.collectives.from_chief import from_chief
from mpidist.parameter_server.client.client import Client
from mpidist.parameter_server.client.server_end import error_kind
from mpidist.parameter_server.layout import Key, Layout, VariableSpec
from mpidist.parameter_server.registry import WORDS
from mpidist.variables import read_only

P = ParamSpec("P")
T = TypeVar("T")


def _by_first(method: Callable[Concatenate[Client, P], T]) -> Callable[Concatenate[GroupClient, P], T]:
    """Return a method that calls a client's on the first rank, and returns its result, which JSON can hold, on all."""

    @functools.wraps(method)
    def together(self: GroupClient, *arguments: P.args, **named: P.kwargs) -> T:
        result: T = self._first(lambda client: method(client, *arguments, **named))
        return result

    return together


class GroupClient:
    """The interface of `Client`, for the ranks of one worker.

    Collective among them: every rank of the worker calls the methods in the same order.  `value` is Local inside of
    `Strategy.run`, and collective outside where something was changed since the last reading.
    """

    #: `value` has to be asked for each.
    snapshot: Mapping[Key, Any] = {}
    #: Grows when `value` may give something else.
    moment = 0

    def __init__(self, communicator: Communicator, client: Client | None, is_chief: bool) -> None:
        self.is_chief = is_chief
        self._communicator = communicator
        #: The client that speaks with the servers, on the first rank; None on the others.
        self.first: Client | None = client
        self._specs: dict[Key, VariableSpec] = {}
        self._apart: set[Key] = set()
        self._views: dict[Key, Any] = {}
        self._layout: Layout | None = None
        self._memory = numpy.empty(0, numpy.uint8)
        self._is_stale = True

    # -- variables ----------------------------------------------------------------------------------------------------

    def create(self, spec: VariableSpec, server: int, value: Any) -> None:
        """Make a variable known to its server."""
        call = self._communicator.call("Variable", [(spec.name, spec.dtype, spec.shape)])
        self._communicator.check(call)
        self._first(lambda client: client.create(spec, server, value))
        self._specs[spec.key] = spec
        if spec.key[0] >= WORDS:  # nobody reads it in every step
            self._apart.add(spec.key)
        self._layout, self._is_stale = None, True

    def begin_function(self) -> None:
        """Begin a scheduled function, with the servers' present values."""
        if self.first is not None:
            self.first.begin_function()
        self.refresh()

    def refresh(self) -> None:
        """Give all ranks the servers' present values."""
        self.moment += 1
        if self._layout is None:
            self._layout = Layout(spec for key, spec in self._specs.items() if key not in self._apart)
            self._memory = numpy.zeros(self._layout.nbytes + 1, numpy.uint8)  # the last says whether it could be read
            self._views = self._layout.views(self._memory)
        error = self._take_all()
        if self._views:
            self._memory[-1] = error is not None
            self._communicator.broadcast(self._memory)
            if self._memory[-1]:
                self._first(lambda client: _raise(error))
        self._is_stale = False

    def _take_all(self) -> Exception | None:
        """Copy what the servers have, on the first rank; return what went wrong, for which the others wait."""
        if self.first is not None:
            try:
                self.first.refresh()
                for key, view in self._views.items():
                    view[...] = self.first.value(key)
            except Exception as error:  # whatever it is
                return error
        return None

    def value(self, key: Key) -> Any:
        """Return the value in the present snapshot; read-only."""
        if key in self._apart:
            self.moment += 1  # it is what the server has now
            return self.read(key)
        in_step = context.has_strategy() and not context.in_cross_replica_context()
        if key not in self._views or (self._is_stale and not in_step):
            self.refresh()
        return read_only(self._views[key])

    def read(self, key: Key) -> Any:
        """Return the value that the server has now, as a new array."""
        spec = self._specs[key]
        found = numpy.empty(spec.shape, spec.dtype)
        self._first(lambda client: found.__setitem__(..., client.read(key)))
        self._communicator.broadcast(found)
        return found

    def assign(self, key: Key, value: Any, verb: str = "assign") -> None:
        """Set a variable, add to it, or subtract from it."""
        self._first(lambda client: client.assign(key, value, verb))
        self._is_stale = True

    def lookup(self, key: Key, indices: Any) -> Any:
        """Return rows; each rank gets those that it asked for."""
        self._set_apart(key)
        asked = self._communicator.exchange(numpy.asarray(indices, numpy.int64).tobytes(), "lookup")
        numbers = [numpy.frombuffer(each, numpy.int64) for each in asked]
        spec, count = self._specs[key], sum(map(len, numbers))
        rows = numpy.empty((count, *spec.shape[1:]), spec.dtype)
        self._first(lambda client: rows.__setitem__(..., client.lookup(key, numpy.concatenate(numbers))))
        self._communicator.broadcast(rows)
        rank = self._communicator.rank
        start = sum(map(len, numbers[:rank]))
        return rows[start : start + len(numbers[rank])].copy()

    def scatter(self, key: Key, verb: str, indices: Any, rows: Any) -> None:
        """Change some rows, which are the same on all ranks."""
        self._set_apart(key)
        self._first(lambda client: client.scatter(key, verb, indices, rows))

    def add(self, key: Key, values: Any) -> None:
        """Add to all rows of a variable that is kept apart; the same values on all ranks."""
        self._apart.add(key)
        self._first(lambda client: client.add(key, values))

    def _set_apart(self, key: Key) -> None:
        """Send a variable no more with the others: it has seen a sparse operation."""
        if key not in self._apart:
            self._apart.add(key)
            self._layout = None
            self._is_stale = True

    version = _by_first(Client.version)

    # -- optimizers ---------------------------------------------------------------------------------------------------

    register_optimizer = _by_first(Client.register_optimizer)
    flush = _by_first(Client.flush)
    iterations = _by_first(Client.iterations)
    set_iterations = _by_first(Client.set_iterations)
    skipped_steps = _by_first(Client.skipped_steps)
    learning_rate = _by_first(Client.learning_rate)
    set_learning_rate = _by_first(Client.set_learning_rate)
    restore_optimizer = _by_first(Client.restore_optimizer)

    def push(self, number: int, pairs: Sequence[tuple[Key, Any]], scale: float = 1.0) -> None:
        """Send gradients, which are sums over the worker's ranks.  Local: only the first does something."""
        if self.first is not None:
            self.first.push(number, pairs, scale)
        self._is_stale = True

    def skip(self, number: int) -> None:
        """Have a step counted that is left out.  Local: only the first does something."""
        if self.first is not None:
            self.first.skip(number)

    def optimizer_state(self, number: int) -> dict[str, Any]:
        """Return steps, settings, and slots as ``"variable/shard/slot"``."""
        state: dict[str, Any] = {}

        def describe(client: Any) -> list[Any]:
            state.update(client.optimizer_state(number))
            return [
                [name, each.dtype.str, list(each.shape)] if hasattr(each, "dtype") else [name, each]
                for name, each in state.items()
            ]

        for name, *rest in self._first(describe):
            if len(rest) == 1:
                state[name] = rest[0]
                continue
            dtype, shape = rest
            array = numpy.empty(shape, dtype)
            if self.first is not None:
                array[...] = state[name]
            self._communicator.broadcast(array)
            state[name] = array
        return state

    def undivided(self, act: Callable[[], Any]) -> Any:
        """Return what `act` returns: a worker does without a server only between functions."""
        return act()

    def meet(self, number: int, timeout_seconds: float | None = None) -> None:
        """Wait until all workers have come here, and what they have pushed is applied."""
        self._first(lambda client: client.meet(number, timeout_seconds), timeout_seconds)

    def idle(self) -> None:
        """Say that this worker has no work for now.  Local."""
        if self.first is not None:
            self.first.idle()

    def leave(self) -> None:
        """Tell the servers that this worker pushes no more.  Local."""
        if self.first is not None:
            self.first.leave()

    # -- the first for all --------------------------------------------------------------------------------------------

    def _first(self, fn: Callable[[Any], Any], timeout_seconds: float | None = None) -> Any:
        """Call `fn` with the client on the first rank, and return its result, which JSON can hold, on all."""
        found = from_chief(self._communicator, lambda: fn(self.first), "servers", timeout_seconds=timeout_seconds)
        return found.checked(error_kind)


def _raise(error: Exception | None) -> None:
    assert error is not None
    raise error
