"""`Server`: the loop of a ps rank.  It takes what clients send, applies it to its `Store`, and answers.

Everything is done in the order in which it comes; nothing is done by a second thread.  What must wait for others, such
as a read that is ahead of its clock, is put aside and looked at again after every message.
"""

from __future__ import annotations

import math
import pickle
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy

from mpidist.errors import PeerLostError, TransportError
from mpidist.optimizers.base import Optimizer
from mpidist.options import settings
from mpidist.parameter_server import protocol
from mpidist.parameter_server.consistency import Asynchronous, Consistency
from mpidist.parameter_server.layout import Key, Plan, VariableSpec
from mpidist.parameter_server.protocol import Kind, PushHeader
from mpidist.parameter_server.published import LEDGER_OPTIMIZERS, Buffers, Ledger, NoCopy
from mpidist.parameter_server.served_optimizer import ServedOptimizer, packed
from mpidist.parameter_server.store import Planned, Store
from mpidist.parameter_server.turn import Turn
from mpidist.runtime.board import fence
from mpidist.runtime.shared_memory import SharedFile
from mpidist.transports.connections.base import Area, Connection, Message
from mpidist.transports.connections.waiting import Patience

_SEE = "; see 'What memory it takes' in the documentation of parameter servers"

#: How many headers of pushes are kept unpacked.
_KEPT_HEADERS = 256


class _Client:
    """What a server knows of one client."""

    def __init__(self, number: int, line: Connection, applied_word: int) -> None:
        self.number = number
        self.line = line
        self.applied_word = applied_word
        self.arrived = 0
        self.is_here = True
        #: What this client has sent first, while it waits for the server's turn, or for a copy to be written.
        self.first: Message | None = None
        #: By the client's number.
        self.plans: dict[int, Planned] = {}
        self._areas: list[Area] = []

    def area(self, nbytes: int) -> Area:
        """Return memory for an answer that is free, or will be."""
        for area in self._areas:
            if area.array.size >= nbytes and not area.busy:
                return area
        for area in self._areas:
            if not area.busy:
                self._areas.remove(area)
                area.close()
                break
        if len(self._areas) < 2:
            self._areas.append(self.line.area(max(4096, nbytes)))
            return self._areas[-1]
        self._areas[0].wait_free()
        return self.area(nbytes)


class _Push:
    """A push between its arrival and its application.  See `Consistency.arrived`."""

    __slots__ = ("client", "number", "optimizer", "plan", "iteration", "iterations", "header", "message", "dropped")

    def __init__(self, client: _Client, header: PushHeader, message: Message, plan: Planned, iterations: int) -> None:
        self.client = client.number
        self.number = client.arrived
        self.optimizer = header.optimizer
        self.plan = plan
        self.iteration = header.iteration
        self.iterations = iterations
        self.header = header
        self.message = message
        self.dropped = False


class _Waiting(Exception):
    """Raised by what cannot be answered yet."""


class _NeedsTurn(Exception):
    """Raised by what would change variables, or has read what another was writing, in nobody's turn."""


class Server:
    """One ps rank.

    Parameters
    ----------
    lines : sequence of Connection
        To the clients, by client number.
    number : int
        Of this server.
    consistency : Consistency
        When clients may go on.

    Attributes
    ----------
    store : Store
    """

    _has_warned = False

    def __init__(self, lines: Sequence[Connection], number: int = 0, consistency: Consistency | None = None) -> None:
        self.number = number
        self._lines = list(lines)
        shares = settings().shared_memory and any(line.is_shared for line in lines)
        self._ledger_file = self._shared_ledger(len(lines)) if shares else None
        private = bytearray(Ledger.nbytes(len(lines)))
        self.ledger = Ledger(private if self._ledger_file is None else self._ledger_file.map(), len(lines))
        for optimizer in range(LEDGER_OPTIMIZERS):
            self.ledger.words[Ledger.steps_word(optimizer)] = -1
        self._short = Patience(self._lines, f"ps {number}", idle=True, warns=True)
        self.store = Store(len(lines) if self._ledger_file is not None else 0)
        self.consistency = (consistency or Asynchronous()).start(range(len(lines)))
        self.clients = [_Client(n, line, Ledger.applied_word(n)) for n, line in enumerate(lines)]
        self._turn = self._own_turn()
        self._changes_known = self._changes()
        self._headers: dict[bytes, PushHeader] = {}
        self._aside: list[tuple[_Client, Callable[[], None]]] = []
        #: Pushes that are to be applied, each list as one; they wait only while there is no copy to be written.
        self._ready: list[list[Any]] = []
        self._verbs = {name[4:]: getattr(self, name) for name in dir(type(self)) if name.startswith("_on_")}

    def _shared_ledger(self, clients: int) -> SharedFile | None:
        try:
            return SharedFile(Ledger.nbytes(clients))
        except OSError as error:
            text = f"ps {self.number} has no shared memory ({error}); its clients pull by messages"
            self._lines[0].presence.control.warn(text)
            return None

    def _own_turn(self) -> Turn | None:
        """Return what is taken before variables are changed, where clients may change them, too."""
        if self._ledger_file is None or self.consistency.has_clock or self.consistency.gathers:
            return None
        patience = Patience(self._lines, f"ps {self.number} waits for its turn", idle=True, warns=True)
        try:
            return Turn(self._ledger_file.path, self.ledger.words, patience, self._lines[0].presence.control)
        except OSError:  # then it is the only one that changes them
            return None

    def _is_short(self, buffers: Buffers) -> None:
        """Show in the ledger that clients are to give back copies that they do not look at any more."""
        words = self.ledger.words
        if not words[Ledger.SHORT]:
            words[Ledger.SHORT] = 1
            self._short.reset()
            self._short.what = (
                f"ps {self.number} waits for a client to give back a copy of its variables of "
                f"{buffers.layout.nbytes} bytes, since there is no memory for one more{_SEE}"
            )
        for client in self.clients:
            if client.line.gone:
                buffers.forget(client.number)

    @property
    def pushes(self) -> int:
        """Gradients applied so far, or dropped as too late."""
        return self.ledger.words[Ledger.PUSHES]

    # -- the loop -----------------------------------------------------------------------------------------------------

    def serve(self) -> None:
        """Serve until every client has left, or is lost.

        Raises
        ------
        RankFailedError
            A rank failed, where the job does not go on without it.
        """
        patience = Patience(self._lines, f"ps {self.number} waits for its clients", idle=True)
        try:
            while any(client.is_here for client in self.clients):
                if self.poll():
                    patience.reset()
                elif self._wait(patience):
                    self._look_for_losses()
        finally:
            self.close()

    def poll(self) -> bool:
        """Take at most one message of every client; return whether anything was done."""
        found = bool(self._ready) and self._apply([])
        for client in self.clients:
            message = client.first or (client.line.receive() if client.is_here else None)
            if message is not None:
                found = self._take(client, message) or found
        return found

    def _wait(self, patience: Patience) -> bool:
        """Let others run, since there is nothing to do; return whether this looked around."""
        if self.ledger.words[Ledger.SHORT]:
            return self._short.tick()
        waiting = [client for client in self.clients if client.first is not None]
        if not waiting:
            return patience.tick()
        assert self._turn is not None
        looked = self._turn.wait()
        if looked:  # who has the turn may be stopped
            for client in waiting:
                self._take_in_no_turn(client)
        return looked

    def close(self) -> None:
        """Give memory back; clients that read it keep it."""
        self.store.buffers.close()
        if self._turn is not None:
            self._turn.close()
        if self._ledger_file is not None:
            self._ledger_file.unlink()

    def _take(self, client: _Client, message: Message) -> bool:
        """Deal with a message; return False if it has to wait for the turn, and the client's later ones with it."""
        client.first, turn = message, self._turn
        try:
            if turn is None:
                self._deal_with(client, message)
            elif not turn.taken():
                return False
            else:
                self._caught_up(client, message)
                turn.leave()
        except BaseException as error:
            if turn is not None:
                turn.leave()
            if not isinstance(error, NoCopy):
                raise
            client.first = message
            self._is_short(self.store.buffers)
            return False
        self._is_short_no_more()
        return True

    def _is_short_no_more(self) -> None:
        if self.ledger.words[Ledger.SHORT] and not self._ready and all(each.first is None for each in self.clients):
            self.ledger.words[Ledger.SHORT] = 0

    def _take_in_no_turn(self, client: _Client) -> None:
        """Deal with a message that only reads while another has the turn, unless that writes what it reads."""
        assert client.first is not None
        if self._changes() != self._changes_known:
            self._catch_up()  # and again in the next turn: a step may be half counted
        with suppress(_NeedsTurn):
            self._deal_with(client, client.first, has_turn=False)

    def _caught_up(self, client: _Client, message: Message) -> None:
        if self._changes() != self._changes_known:
            self._catch_up()
        try:
            self._deal_with(client, message)
        finally:
            self._changes_known = self._changes()

    def _changes(self) -> tuple[int, int]:
        words = self.ledger.words
        return words[Ledger.PUSHES], words[Ledger.RATES]

    def _catch_up(self) -> None:
        """Take note of the steps that clients have made themselves, and of the learning rates they have set."""
        for number, served in self.store.optimizers.items():
            served.optimizer.iterations = self.ledger.words[Ledger.steps_word(number)]
            rate = self.ledger.reals[Ledger.rate_real(number)]
            if not math.isnan(rate):
                served.optimizer.learning_rate = rate

    def _deal_with(self, client: _Client, message: Message, has_turn: bool = True) -> None:
        kind = message.header[0]
        if kind == protocol.PUSH_KIND:
            if not has_turn:
                raise _NeedsTurn
            client.first = None
            self._take_push(client, message)
        elif kind == protocol.REQUEST_KIND:
            self._answer(client, message, has_turn)
        else:
            client.first = None
            self._note(client, protocol.unpack(message.header))
            message.release()
        if self._aside:
            self._look_again()

    def _look_for_losses(self) -> None:
        for client in self.clients:
            if client.is_here and client.line.gone and client.line.lost:
                self._gone(client)

    def _gone(self, client: _Client) -> None:
        client.is_here = False
        self._aside = [(whose, attempt) for whose, attempt in self._aside if whose is not client]
        self._set_active(client.number, False)
        if self._aside:
            self._look_again()

    def _look_again(self) -> None:
        """Try what was put aside once more."""
        aside, self._aside = self._aside, []
        for _, attempt in aside:
            attempt()

    # -- pushes -------------------------------------------------------------------------------------------------------

    def _take_push(self, client: _Client, message: Message) -> None:
        header = self._push_header(message.header)
        client.arrived += 1
        try:
            plan = client.plans[header.plan]
            if self.consistency.gathers:
                self._gather(client, header, message, plan)
                return
            self.store.push(
                header.optimizer, plan, ((header.counts, message.payload),), header.learning_rate, header.scale
            )
        except TransportError:
            raise
        except NoCopy:
            client.arrived -= 1
            raise
        except Exception as error:  # the server outlives a client's mistake, and tells it
            self.consistency.pushed(client.number)  # it was a step, though one in vain
            self._fail_push(client, client.arrived, header.optimizer, message, error)
            return
        self.consistency.pushed(client.number)
        message.release()
        self._done(client, header.optimizer)

    def _push_header(self, raw: bytes) -> PushHeader:
        """Return a header, the same object if it has come before: most pushes say the same."""
        header = self._headers.get(raw)
        if header is None:
            if len(self._headers) >= _KEPT_HEADERS:
                self._headers.clear()
            header = self._headers[raw] = PushHeader.unpack(raw)
        return header

    def _gather(self, client: _Client, header: PushHeader, message: Message, plan: Planned) -> None:
        iterations = self.store.optimizers[header.optimizer].optimizer.iterations
        push = _Push(client, header, message, plan, iterations)
        ready = self.consistency.arrived(push)
        if push.dropped:
            message.release()
            self._done(client, header.optimizer)
        self._apply(ready)

    def _apply(self, ready: list[Any]) -> bool:
        """Apply pushes as one, and what this makes ready, after those that had to wait; return whether any was."""
        if ready:
            self._ready.append(ready)
        done = False
        while self._ready:
            ready = self._ready[0]
            first = ready[0].header
            try:
                pushed = [(push.header.counts, push.message.payload) for push in ready]
                self.store.push(first.optimizer, ready[0].plan, pushed, first.learning_rate, first.scale)
            except NoCopy:
                self._is_short(self.store.buffers)
                return done
            except Exception as error:
                for push in ready:
                    self._fail_push(self.clients[push.client], push.number, push.optimizer, push.message, error)
            else:
                for push in ready:
                    push.message.release()
                    self._done(self.clients[push.client], first.optimizer)
            self._ready.pop(0)
            done = True
            if more := self.consistency.complete():
                self._ready.append(more)
        self._is_short_no_more()
        return done

    def _fail_push(self, client: _Client, number: int, optimizer: int, message: Message, error: Exception) -> None:
        message.release()
        self._show()
        failure = self._failure(error, f"push {number}")
        self._send(client, Kind.PUSH_FAILURE, {**failure, "push": number})
        self._done(client, optimizer)

    def _done(self, client: _Client, number: int) -> None:
        """Show in the ledger how far things are: steps before pushes, since who sees its push sees its step."""
        words = self.ledger.words
        words[Ledger.PUSHES] += 1
        words[Ledger.LAYOUT] = self.store.layout_number
        optimizer = self.store.optimizers.get(number)
        if optimizer is not None:
            words[Ledger.steps_word(number)] = optimizer.optimizer.iterations
        fence()
        words[client.applied_word] += 1
        if self.consistency.has_clock:
            self._publish_clock()

    def _publish_clock(self) -> None:
        for client in self.clients:
            self.ledger.words[client.applied_word + 1] = self.consistency.permitted(client.number)

    def _set_active(self, client: int, is_active: bool) -> None:
        self.consistency.set_active(client, is_active)
        self._apply(self.consistency.complete())
        if self.consistency.has_clock:
            self._publish_clock()

    # -- answers ------------------------------------------------------------------------------------------------------

    def _answer(self, client: _Client, message: Message, has_turn: bool) -> None:
        request = protocol.unpack(message.header)
        array = None
        if "array" in request:
            array = protocol.as_described(message.payload, request["array"])
        if not has_turn and not self._only_reads(request):
            raise _NeedsTurn

        def attempt() -> None:
            try:
                found = self._found(client, request, array, has_turn)
            except _Waiting:
                self._aside.append((client, attempt))
                return
            except (TransportError, _NeedsTurn, NoCopy):
                raise
            except Exception as error:  # the server outlives a client's mistake, and tells it
                message.release()
                self._show()  # it may have got as far as to lay out anew
                self._send(client, Kind.FAILURE, self._failure(error, request["verb"]))
                return
            message.release()
            self._show()
            self._send(client, Kind.ANSWER, *found)

        attempt()
        client.first = None

    def _only_reads(self, request: dict[str, Any]) -> bool:
        """Whether a request changes nothing that clients change, too: neither variables nor where they lie."""
        verb = request["verb"]
        if verb == "layout":
            return self.store.is_laid_out
        if verb == "lookup":
            return self.store.is_table(_key(request))
        if verb == "rate":
            return request["value"] is None and "array" not in request
        return verb in _READS

    def _found(
        self, client: _Client, request: dict[str, Any], array: Any, has_turn: bool
    ) -> tuple[dict[str, Any], Area | None, int]:
        """Return the answer to a request: content, and the area and bytes of an array that belongs to it."""
        buffers, stamp = self.store.buffers, self.store.buffers.stamp()
        content, *arrays = self._verbs[request["verb"]](client, request, array)
        if not arrays:
            return content, None, 0
        found = numpy.asarray(arrays[0])
        area = client.area(found.nbytes)
        area.array[: found.nbytes].view(found.dtype).reshape(found.shape)[...] = found
        if not has_turn and not buffers.is_as(stamp):
            raise _NeedsTurn
        return {**content, "array": protocol.described(found)}, area, found.nbytes

    def _show(self) -> None:
        """Show in the ledger which layout holds, and whether anything is torn: who changes variables goes by it."""
        self.ledger.words[Ledger.LAYOUT] = self.store.layout_number
        self.ledger.words[Ledger.TORN] = self.store.is_torn

    def _send(
        self, client: _Client, kind: Kind, content: dict[str, Any], area: Area | None = None, nbytes: int = 0
    ) -> None:
        if client.line.gone:
            return
        try:
            if area is None:
                client.line.send(protocol.pack(kind, content))
            else:
                client.line.send(protocol.pack(kind, content), area, nbytes)
        except PeerLostError:  # it died meanwhile, and the job goes on
            self._gone(client)

    def _failure(self, error: Exception, what: str) -> dict[str, Any]:
        place = traceback.extract_tb(error.__traceback__)[-1:]
        where = f" ({place[0].name}, line {place[0].lineno})" if place else ""
        return {"what": what, "kind": type(error).__name__, "text": _text_of(error) + where * (type(error) in _OURS)}

    def _note(self, client: _Client, note: dict[str, Any]) -> None:
        if note["verb"] == "leave":
            client.line.lose("left")  # that its process is gone soon is no death
            self._gone(client)
        elif note["verb"] == "aside":
            self.consistency.stand_aside(client.number)
            self._set_active(client.number, False)
        else:
            self._set_active(client.number, note["verb"] == "active")

    # -- requests: each returns the answer's content, and perhaps an array --------------------------------------------

    def _on_hello(self, client: _Client, request: dict[str, Any], array: Any) -> tuple[Any, ...]:
        path = self._ledger_file.path if self._ledger_file is not None and client.line.is_shared else ""
        if self.consistency.has_clock:
            self._publish_clock()
        rule = {"has_clock": self.consistency.has_clock, "gathers": self.consistency.gathers}
        takes_turns = self._turn is not None
        return ({"ledger": path, "clients": len(self.clients), "takes_turns": takes_turns, **rule},)

    def _on_create(self, client: _Client, request: dict[str, Any], array: Any) -> tuple[Any, ...]:
        spec = VariableSpec.from_description(request["spec"])
        known = self.store.variables.get(spec.key)
        if known is None:
            if array is None:
                raise _Waiting  # for the chief
            self.store.create(spec, array)
            return ({},)
        if (known.name, known.shape, known.dtype) != (spec.name, spec.shape, spec.dtype):
            raise ValueError(
                f"variable number {spec.key[0]} is {known.spec} at this server, and client {client.number} creates "
                f"{spec}; all clients must create the same variables in the same order"
            )
        return ({},)

    def _on_layout(self, client: _Client, request: dict[str, Any], array: Any) -> tuple[Any, ...]:
        self.store.lay_out()
        buffers = self.store.buffers
        if request["maps"] and not buffers.admit(client.number) and not self._has_warned:
            self._has_warned = True
            client.line.presence.control.warn(
                f"ps {self.number} has no memory for {len(self.clients) + 2} copies of its variables of "
                f"{buffers.layout.nbytes} bytes, which its clients on this node may need: pushes may wait for one{_SEE}"
            )
        specs = [spec.described() for spec in buffers.layout.specs]
        return ({"number": self.store.layout_number, "path": buffers.path, "token": buffers.token, "specs": specs},)

    def _on_pull(self, client: _Client, request: dict[str, Any], array: Any) -> tuple[Any, ...]:
        self._require_done(client)
        buffers = self.store.buffers
        if buffers.count == 1:  # written in place
            self.store.require_whole(buffers.layout.index)
        content = {"layout": self.store.layout_number, "versions": buffers.versions.tolist()}
        return content, buffers.bytes[buffers.current][: buffers.layout.nbytes]

    def _on_step(self, client: _Client, request: dict[str, Any], array: Any) -> tuple[Any, ...]:
        self._require_done(client)
        if request["pushed"] > self.consistency.permitted(client.number):
            raise _Waiting
        return ({"steps": self._steps()},)

    def _steps(self) -> list[int]:
        """Return the steps of each optimizer by its number, -1 for a number that none has yet."""
        count = 1 + max(self.store.optimizers, default=-1)
        return self.ledger.words[Ledger.steps_word(0) : Ledger.steps_word(count)].tolist()

    def _on_flush(self, client: _Client, request: dict[str, Any], array: Any) -> tuple[Any, ...]:
        self._require_done(client)
        return ({},)

    def _on_assign(self, client: _Client, request: dict[str, Any], array: Any) -> tuple[Any, ...]:
        self.store.assign(_key(request), request["how"], array)
        return ({},)

    def _on_read(self, client: _Client, request: dict[str, Any], array: Any) -> tuple[Any, ...]:
        self._require_done(client)
        key = _key(request)
        return {"version": self.store.version(key)}, self.store.read(key)

    def _on_lookup(self, client: _Client, request: dict[str, Any], array: Any) -> tuple[Any, ...]:
        self._require_done(client)
        return {}, self.store.lookup(_key(request), array)

    def _on_scatter(self, client: _Client, request: dict[str, Any], array: Any) -> tuple[Any, ...]:
        spec = self.store.variables[_key(request)].spec
        count = request["count"]
        indices = array[: 8 * count].view(numpy.int64)
        rows = array[8 * count :].view(spec.dtype).reshape(count, *spec.shape[1:])
        self.store.scatter(spec.key, request["how"], indices, rows)
        return ({},)

    def _on_versions(self, client: _Client, request: dict[str, Any], array: Any) -> tuple[Any, ...]:
        return ({"versions": [[*key, version] for key, version in self.store.versions().items()]},)

    def _on_plan(self, client: _Client, request: dict[str, Any], array: Any) -> tuple[Any, ...]:
        dense, sparse = ([self.store.variables[key].spec for key in map(tuple, request[name])] for name in _PARTS)
        narrow = None if request["push_dtype"] is None else numpy.dtype(request["push_dtype"])
        plan = Plan(tuple(dense), tuple(sparse), narrow)
        for number in request["forgotten"]:
            client.plans.pop(number, None)
        client.plans[request["number"]] = self.store.planned(plan)
        return ({},)

    def _on_register(self, client: _Client, request: dict[str, Any], array: Any) -> tuple[Any, ...]:
        number = request["number"]
        if number >= LEDGER_OPTIMIZERS:
            raise ValueError(f"a server takes {LEDGER_OPTIMIZERS} optimizers, and this is number {number}")
        if number not in self.store.optimizers:
            self.store.optimizers[number] = ServedOptimizer(bytes(array))
            self._show_rule(number)
        return ({},)

    def _show_rule(self, number: int) -> None:
        """Show in the ledger that an optimizer has other settings, and its steps and learning rate."""
        optimizer = self.store.optimizers[number].optimizer
        words = self.ledger.words
        words[Ledger.steps_word(number)] = optimizer.iterations
        self._show_rate(number)
        words[Ledger.RULES] += 1

    def _show_rate(self, number: int) -> None:
        """Show the learning rate, NaN where it is more than a number that somebody has set."""
        optimizer = self.store.optimizers[number].optimizer
        is_plain = not optimizer.has_schedule and type(optimizer).learning_rate is Optimizer.learning_rate
        self.ledger.reals[Ledger.rate_real(number)] = optimizer.learning_rate if is_plain else math.nan

    def _on_rule(self, client: _Client, request: dict[str, Any], array: Any) -> tuple[Any, ...]:
        optimizer = self._optimizer(request)
        if not optimizer.is_stateless:
            return ({},)
        return {}, numpy.frombuffer(packed(optimizer.optimizer), numpy.uint8)

    def _on_state(self, client: _Client, request: dict[str, Any], array: Any) -> tuple[Any, ...]:
        self._require_done(client)
        state = self._optimizer(request).state()
        arrays = {name: value for name, value in state.items() if isinstance(value, numpy.ndarray)}
        plain = {name: value for name, value in state.items() if name not in arrays}
        places = [[name, *protocol.described(value)] for name, value in arrays.items()]
        return {"plain": plain, "arrays": places}, protocol.joined(list(arrays.values()))

    def _on_restore(self, client: _Client, request: dict[str, Any], array: Any) -> tuple[Any, ...]:
        names = [name for name, *_ in request["arrays"]]
        values = protocol.parted(array, [description for _, *description in request["arrays"]])
        optimizer = self._optimizer(request)
        try:
            optimizer.restore({**request["plain"], **dict(zip(names, values, strict=True))}, self.store.variables)
        finally:  # however far it came
            self._show_rule(request["number"])
        return ({},)

    def _on_iterations(self, client: _Client, request: dict[str, Any], array: Any) -> tuple[Any, ...]:
        self._require_done(client)
        self._optimizer(request).optimizer.iterations = request["value"]
        self.ledger.words[Ledger.steps_word(request["number"])] = request["value"]
        return ({},)

    def _on_rate(self, client: _Client, request: dict[str, Any], array: Any) -> tuple[Any, ...]:
        self._require_done(client)
        optimizer = self._optimizer(request).optimizer
        if array is not None:
            optimizer.learning_rate = pickle.loads(bytes(array))
            self._show_rule(request["number"])
        elif request["value"] is not None:
            optimizer.learning_rate = request["value"]
            self._show_rate(request["number"])
        return ({"value": optimizer.learning_rate, "iterations": optimizer.iterations},)

    def _optimizer(self, request: dict[str, Any]) -> ServedOptimizer:
        try:
            return self.store.optimizers[request["number"]]
        except KeyError:
            raise KeyError(f"there is no optimizer {request['number']} here") from None

    def _require_done(self, client: _Client) -> None:
        """Raise _Waiting while a push of this client is not done with: a client reads what it wrote."""
        if self.ledger.words[client.applied_word] < client.arrived:
            raise _Waiting


_PARTS = ("dense", "sparse")

#: Requests that need no turn: those that change nothing, and `create`, whose variable nobody sees yet.
_READS = frozenset(("hello", "create", "pull", "step", "flush", "read", "versions", "plan", "rule", "state"))

#: Errors whose text alone does not say where they come from.
_OURS = (AssertionError, AttributeError, TypeError, KeyError)


def _text_of(error: Exception) -> str:
    return str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)


def _key(request: dict[str, Any]) -> Key:
    number, shard = request["key"]
    return number, shard
