"""`Client`: the variables on all servers, as one process that trains sees them.

Reading takes a *snapshot* of a server: all its variables at one moment, this client's pushes included.  It lasts until
the client pushes or assigns, or asks for a fresh one.  Pushing sends gradients of many variables at once, and does not
wait: two messages to each server may be under way.  On the server's node it may be done at once instead, see `Direct`.

What is sent is described by plans, which are made once for each list of variables, and kept for the lists that were
pushed last: see `PlanCache`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from operator import itemgetter
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy

from mpidist import arrays
from mpidist.errors import PeerLostError, ServerError
from mpidist.optimizers.base import LearningRate, Optimizer
from mpidist.parameter_server import protocol
from mpidist.parameter_server.client.near_server import NearServer
from mpidist.parameter_server.client.plans import PlannedList, Plans
from mpidist.parameter_server.client.server_end import ServerEnd
from mpidist.parameter_server.layout import Key, VariableSpec
from mpidist.parameter_server.pickles import packed, pickled
from mpidist.parameter_server.registry import WORDS
from mpidist.runtime.shared_memory import map_file
from mpidist.transports.connections.base import Connection
from mpidist.variables import IndexedSlices

P = ParamSpec("P")
T = TypeVar("T")

_NOTHING: dict[Key, Any] = {}
_KEY, _GRADIENT = itemgetter(0), itemgetter(1)


def _asks(method: Callable[Concatenate[Client, P], T]) -> Callable[Concatenate[Client, P], T]:
    """Have a method that asks servers, or sends them something, called by the client's guard, if it has one."""

    @functools.wraps(method)
    def guarded(self: Client, *arguments: P.args, **named: P.kwargs) -> T:
        if self.guard is None:
            return method(self, *arguments, **named)
        return self.guard(functools.partial(method, self, *arguments, **named))

    return guarded


class Client:
    """The variables on all servers.  All Local: it talks to servers only."""

    #: Grows when servers are lost.
    generation = 0
    #: What calls the methods that ask servers, to ask again when one has been replaced, see `Recovery`.
    guard: Callable[[Callable[[], Any]], Any] | None = None
    #: Grows when the next reading may give something else.
    moment = 0

    def __init__(
        self, connections: Sequence[Connection], number: int, worker_count: int, is_chief: bool, push_dtype: Any = None
    ) -> None:
        self.number = number
        self.worker_count = worker_count
        self.is_chief = is_chief
        self.servers = self._opened(connections)
        #: By number; without servers that are gone.
        self._ends = {end.number: end for end in self.servers}
        #: The variables that this client has created.
        self.specs: dict[Key, VariableSpec] = {}
        self._server_of: dict[Key, int] = {}
        #: The variables in the present snapshots of all servers; of a single one, its own dict.
        self.snapshot: dict[Key, Any] = _NOTHING
        self._pulled: set[int] = set()
        self._tables: dict[Key, tuple[Any, int]] = {}
        self._alone: set[Key] = set()  # tables, once and for all
        self.plans = Plans(self.servers, self.specs, self.server_of, push_dtype)
        self._optimizers = 0
        self._clocks = self._find_clocks()
        self._in_step = not self._clocks
        self._is_idle = False
        #: Whether this client has read since its present function began.
        self._has_read = False

    def _opened(self, connections: Sequence[Connection]) -> list[ServerEnd]:
        return [open_server(connection, place, self.number) for place, connection in enumerate(connections)]

    # -- variables ----------------------------------------------------------------------------------------------------

    @_asks
    def create(self, spec: VariableSpec, server: int, value: Any = None) -> None:
        """Make a variable, or a shard of one, known to this client and to its server.

        The chief gives the value.  Others wait until it has.
        """
        initial = None if value is None else numpy.asarray(value, spec.dtype).reshape(spec.shape)
        if server not in self._ends:  # the same one for all clients, who all know by now that it is gone
            server = self.servers[server % len(self.servers)].number
        self._ends[server].ask("create", initial, spec=spec.described())
        self.specs[spec.key], self._server_of[spec.key] = spec, server

    def value(self, key: Key) -> Any:
        """Return a variable in the present snapshot of its server, which is taken if there is none: a read-only view.

        It stays as it is until this client takes its next snapshot of that server.
        """
        value = self.snapshot.get(key)
        if value is not None:
            return value
        return self._value(key) if self.guard is None else self.guard(functools.partial(self._value, key))

    def _value(self, key: Key) -> Any:
        number = self.server_of(key)
        end = self._ends[number]
        if number not in self._pulled:
            value = self._pull(number).get(key)
            if value is not None:
                return value
        if key not in self._tables:
            if key not in self._alone:
                if end.look_for(key):
                    return self._pull(number)[key]
                self._alone.add(key)
            answer, array = end.ask("read", key=key)
            array.flags.writeable = False
            self._tables[key] = array, answer["version"]
        return self._tables[key][0]

    def _pull(self, number: int) -> dict[Key, Any]:
        if not self._in_step:
            for end in self.servers:
                if end.number not in self._pulled:
                    end.give_back()
            self._begin_step()
        views = self._ends[number].pull()
        self.snapshot = views if len(self.servers) == 1 else {**self.snapshot, **views}
        self._pulled.add(number)
        return views

    def server_of(self, key: Key) -> int:
        """Return the number of the server that holds a variable."""
        try:
            return self._server_of[key]
        except KeyError:
            raise KeyError(f"client {self.number} has created no variable {key}") from None

    def begin_function(self) -> None:
        """Begin a scheduled function: what it pushes is of what it reads itself, or of what the chief has given it."""
        self._in_step, self._has_read = not self._clocks, False
        self.refresh()

    def refresh(self) -> None:
        """End the present snapshot: the next reading is of the variables as they are then."""
        self.moment += 1
        self.snapshot = _NOTHING
        self._pulled.clear()
        if self._tables:
            self._tables = {}

    @_asks
    def read(self, key: Key) -> Any:
        """Return a variable as it is now, as a new array; the present snapshot stays."""
        if not self._in_step:
            self._has_read = False  # what is pushed next may be of this, and not of a snapshot from before
        return self._ends[self.server_of(key)].ask("read", key=key)[1]

    @_asks
    def assign(self, key: Key, value: Any, verb: str = "assign") -> None:
        """Set a variable, or add to it (`assign_add`), or subtract from it (`assign_sub`); returns when it is done."""
        spec, end = self.specs[key], self._ends[self.server_of(key)]
        array = numpy.asarray(value, spec.dtype)
        if array.shape != spec.shape:
            raise ValueError(f"a value of shape {array.shape} was assigned to {spec}")
        self._finish_elsewhere(end)
        end.ask("assign", array, key=key, how=verb)
        self.refresh()

    @_asks
    def lookup(self, key: Key, indices: Any) -> Any:
        """Return some rows of a variable as they are now, as a new array."""
        if not self._in_step and key[0] < WORDS:
            self._begin_step()
        indices = numpy.asarray(indices, numpy.int64)
        spec, end = self.specs[key], self._ends[self.server_of(key)]
        rows = end.ask("lookup", indices.reshape(-1), key=key)[1]
        return rows.reshape(*indices.shape, *spec.shape[1:])

    def _finish_elsewhere(self, end: ServerEnd) -> None:
        """Wait for what other servers were pushed: who sees what this client writes now sees its steps before."""
        for other in self.servers:
            if other is not end and not other.gathers:
                other.flush()

    def add(self, key: Key, values: Any) -> None:
        """Add to all rows of a variable, which is kept apart from then on; the present snapshot stays.

        Pushes to other servers are not waited for: it is for sums that nothing is concluded from.
        """
        self.scatter(key, "scatter_add", numpy.arange(len(values)), values, ends_snapshot=False)

    @_asks
    def scatter(self, key: Key, verb: str, indices: Any, rows: Any, ends_snapshot: bool = True) -> None:
        """Change some rows of a variable by a verb such as `scatter_add`; returns when it is done."""
        spec, end = self.specs[key], self._ends[self.server_of(key)]
        if ends_snapshot:
            self._finish_elsewhere(end)
        indices = numpy.asarray(indices, numpy.int64)
        rows = numpy.broadcast_to(numpy.asarray(rows, spec.dtype), (len(indices), *spec.shape[1:]))
        both = numpy.concatenate([indices.view(numpy.uint8), numpy.ascontiguousarray(rows).reshape(-1).view("u1")])
        end.ask("scatter", both, key=key, how=verb, count=len(indices))
        if ends_snapshot:
            self.refresh()

    def version(self, key: Key) -> int:
        """Return how often the variable had been changed when the value was made that `value` returns."""
        self.value(key)
        number = self.server_of(key)
        if key in self.snapshot:
            return self._ends[number].version(key)
        return self._tables[key][1]

    # -- gradients ----------------------------------------------------------------------------------------------------

    @_asks
    def push(self, optimizer: int, pairs: Sequence[tuple[Key, Any]], scale: float = 1.0) -> PlannedList:
        """Have gradients applied as one step of an optimizer, by this process or by servers, which are not waited for.

        Ends the snapshot.  Returns the plan of their list, for `push_planned`.
        """
        keys, gradients = tuple(map(_KEY, pairs)), list(map(_GRADIENT, pairs))
        kinds = set(map(type, gradients))
        if kinds - _KNOWN_KINDS:
            gradients = [each if isinstance(each, IndexedSlices) else arrays.to_array(each) for each in gradients]
        planned = self.plans.find(keys, gradients, IndexedSlices in kinds)
        self.push_planned(optimizer, planned, gradients, scale)
        return planned

    def push_planned(self, optimizer: int, planned: PlannedList, gradients: Sequence[Any], scale: float = 1.0) -> None:
        """Do what `push` does, with arrays and slices for the list that `plans` has just found."""
        self.plans.lists.use(planned)
        if not self._in_step:
            self._begin_step(reads=False)
        if len(planned.parts) > 1:
            # what is known to be wrong with one server is said before another has its part: all or nothing
            for _, part in planned.parts:
                part.check(part.chosen(gradients))
            for end, part in planned.parts:
                end.settle(optimizer, part)
        for end, part in planned.parts:
            chosen = part.chosen(gradients)
            if not end.apply(optimizer, part, chosen, scale):
                end.push(optimizer, part, chosen, gradients, scale)
        self._in_step = not self._clocks
        self.refresh()

    @_asks
    def flush(self) -> None:
        """Wait until the servers are done with all that this client has pushed."""
        for end in self.servers:
            end.flush()

    # -- optimizers ---------------------------------------------------------------------------------------------------

    @_asks
    def register_optimizer(self, optimizer: Optimizer, number: int | None = None) -> int:
        """Send an optimizer to the servers, unless they have it, and return its number."""
        if number is None:
            number = self._optimizers
        self._optimizers = max(self._optimizers, number + 1)
        content = numpy.frombuffer(packed(optimizer), numpy.uint8)
        for end in self.servers:
            end.ask("register", content, number=number)
        return number

    @_asks
    def iterations(self, number: int) -> int:
        """Return the steps that an optimizer has made, this client's pushes included: the largest of any server."""
        return max(end.iterations(number) for end in self.servers)

    @_asks
    def set_iterations(self, number: int, value: int) -> None:
        """Have an optimizer count its steps from `value` on; slots stay as they are."""
        for end in self.servers:
            end.ask("iterations", number=number, value=value)

    @_asks
    def skip(self, number: int) -> None:
        """Have a step counted that is left out."""
        for end in self.servers:
            end.ask("skipped", number=number, count=1)

    @_asks
    def skipped_steps(self, number: int) -> int:
        """Return the steps of an optimizer that all clients have left out; KeyError if the servers have none such."""
        return self.servers[0].ask("skipped", number=number, count=0)[0]["skipped_steps"]

    @_asks
    def learning_rate(self, number: int) -> float | None:
        """Return an optimizer's learning rate, None where it is a function; KeyError if the servers have none such."""
        return self.servers[0].ask("iterations", number=number, value=None)[0].get("learning_rate")

    @_asks
    def set_learning_rate(self, number: int, value: LearningRate) -> None:
        """Set the learning rate of an optimizer from the next push on: a number, or a function of its steps."""
        if callable(value):
            schedule = numpy.frombuffer(pickled(value), numpy.uint8)
            for end in self.servers:
                end.ask("rate", schedule, number=number)
        else:
            for end in self.servers:
                end.set_rate(number, float(value))

    @_asks
    def optimizer_state(self, number: int) -> dict[str, Any]:
        """Return an optimizer's steps and settings, and its slots as ``"variable/shard/slot"`` to new arrays."""
        state: dict[str, Any] = {}
        for end in self.servers:
            answer, memory = end.ask("state", number=number)
            if answer["plain"]["iterations"] >= state.get("iterations", 0):
                state.update(answer["plain"])
            state.update(protocol.parted(answer["arrays"], memory))
        return state

    @_asks
    def restore_optimizer(self, number: int, state: dict[str, Any]) -> None:
        """Take over what `optimizer_state` gave."""
        slots = {name: numpy.asarray(value) for name, value in state.items() if name.count("/") == 2}
        plain = {name: value for name, value in state.items() if name not in slots}
        for end in self.servers:
            own = {name: value for name, value in slots.items() if self._server_of[_key_of(name)] == end.number}
            places, memory = protocol.joined(own)
            end.ask("restore", memory, number=number, plain=plain, arrays=places)
        self.refresh()

    # -- servers that are gone ----------------------------------------------------------------------------------------

    def lose(self, server: int) -> None:
        """Do without a server that is gone."""
        end = self._ends.get(server)
        if end is None:
            return
        if len(self.servers) == 1:
            raise ServerError(f"{end.name} is gone, which was the only one: start the job again from its checkpoint")
        del self._ends[server]
        self.servers.remove(end)
        end.forget()
        self.plans.forget()
        self.generation += 1
        self.refresh()
        if end in self._clocks:
            self._clocks = self._find_clocks()
            self._is_idle, self._in_step = False, False
            self.idle()

    def undivided(self, act: Callable[[], T]) -> T:
        """Return what `act` returns, called again if servers were replaced meanwhile: then everything was restored."""
        while True:
            generation = self.generation
            result = act()
            if self.generation == generation:
                return result

    def _find_clocks(self) -> list[ServerEnd]:
        """Return the servers that say when this client may go on: the first that is left, or all where they gather."""
        return [end for end in self.servers if end.gathers or (end.has_clock and end is self.servers[0])]

    # -- taking part --------------------------------------------------------------------------------------------------

    def idle(self) -> None:
        """Say that this client has no work for now, so that nobody waits for it.  Its next step ends this."""
        if self._clocks and not self._is_idle:
            self._is_idle = True
            for end in self._clocks:
                with suppress(PeerLostError):  # whoever needs it again will be told
                    end.note("idle")

    def meet(self, number: int, timeout_seconds: float | None = None) -> None:
        """Wait until all clients have come here, and what they have pushed is applied; each meeting has a number.

        Nothing is owed then of gradients from before, and the snapshot is ended, since what follows may restore the
        variables.
        """
        self.plans.residues.drop()
        self.flush()
        self.idle()  # or a gradient might wait for one of a client that waits here
        self._in_step = not self._clocks
        self.refresh()
        self.servers[0].meet(number, timeout_seconds)

    def stand_aside(self) -> None:
        """Make no steps from now on, as a chief that schedules them: nobody waits for it, nor does it for others."""
        for end in self.servers:  # any of them may say one day who may go on
            if end.has_clock or end.gathers:
                end.note("aside")
        self._clocks, self._in_step = [], True

    def _begin_step(self, reads: bool = True) -> None:
        """Wait until the servers let this client start a step, by a reading or by gradients of an earlier one."""
        was_idle, self._is_idle = self._is_idle, False
        for end in self._clocks:
            if was_idle:
                end.note("active")
            steps = end.begin_step(ask=was_idle)
            if reads or not self._has_read:
                end.steps = {number: made for number, made in enumerate(steps) if made > 0}
        self._in_step, self._has_read = True, reads or self._has_read

    def leave(self) -> None:
        """Wait until all pushes are applied, and tell the servers that no more come; they end when all have left."""
        with ExitStack() as stack:
            for end in self.servers:
                stack.callback(end.forget if end.connection.gone else end.leave)
            self.flush()


_KNOWN_KINDS = {numpy.ndarray, IndexedSlices}


def _key_of(name: str) -> Key:
    number, shard, _ = name.split("/", 2)
    return int(number), int(shard)


def open_server(connection: Connection, number: int, client: int) -> ServerEnd:
    """Return a server as a client sees it, after a first word with it.  Local."""
    end = ServerEnd(connection, number, client)
    answer, _ = end.ask("hello")
    end.take_policy(answer)
    if answer["ledger"]:
        try:
            memory = map_file(answer["ledger"])
        except OSError:  # in another container: by messages then
            return end
        return NearServer(end, answer, memory)
    return end
