"""`Requests`: what clients ask a server, and its answers."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import numpy

from mpidist.parameter_server import protocol
from mpidist.parameter_server.consistency import Consistency
from mpidist.parameter_server.layout import Key, PushPlan, VariableSpec
from mpidist.parameter_server.ledger import Ledger
from mpidist.parameter_server.pickles import packed
from mpidist.parameter_server.server.peer import Peer
from mpidist.parameter_server.server.progress import ServerProgress
from mpidist.parameter_server.server.stored_optimizer import StoredOptimizer

SEE = "; see 'What memory it takes' in the documentation of parameter servers"


class Waiting(Exception):
    """Raised by what cannot be answered yet."""


class Requests:
    """The requests that a server answers, by their verbs: each returns content, and perhaps an array, or nothing."""

    _has_warned = False

    def __init__(
        self, number: int, progress: ServerProgress, consistency: Consistency, peers: Sequence[Peer], gives_lock: bool
    ) -> None:
        self._number = number
        self._progress, self._store = progress, progress.store
        self._consistency = consistency
        self._peers = peers
        self._gives_lock = gives_lock
        #: By the number of a meeting: the clients that have come.
        self._met: dict[int, set[int]] = {}
        self._verbs = {name[4:]: getattr(self, name) for name in dir(type(self)) if name.startswith("_on_")}

    def answer(self, peer: Peer, request: dict[str, Any], array: Any) -> tuple[Any, ...]:
        """Return the answer to a request."""
        return self._verbs[request["verb"]](peer, request, array) or ({},)

    def only_reads(self, request: dict[str, Any]) -> bool:
        """Whether a request changes nothing that clients change, too: neither variables nor where they lie."""
        verb = request["verb"]
        if verb == "layout":
            return self._store.is_laid_out
        if verb == "lookup":
            return self._store.is_table(_key(request))
        if verb == "iterations":
            return request["value"] is None
        return verb in _READS

    def _on_hello(self, peer: Peer, request: dict[str, Any], array: Any) -> tuple[Any, ...]:
        self._progress.show_clocks(self._consistency, self._peers)
        policy = {"has_clock": self._consistency.has_clock, "gathers": self._consistency.gathers}
        path = self._progress.path if peer.connection.is_shared else ""
        return ({"ledger": path, "clients": len(self._peers), "gives_lock": self._gives_lock, **policy},)

    # -- variables ----------------------------------------------------------------------------------------------------

    def _on_create(self, peer: Peer, request: dict[str, Any], array: Any) -> None:
        spec = VariableSpec.from_description(request["spec"])
        known = self._store.variables.get(spec.key)
        if known is None:
            if array is None:
                if not self._peers[0].is_here:
                    raise ValueError(
                        f"client {peer.number} creates {spec}, and the chief, which gives the initial values, has "
                        "ended without it; all clients must create the same variables in the same order"
                    )
                raise Waiting  # for the chief
            self._store.create(spec, array)
        elif (known.name, known.shape, known.dtype) != (spec.name, spec.shape, spec.dtype):
            raise ValueError(
                f"variable number {spec.key[0]} is {known.spec} at this server, and client {peer.number} creates "
                f"{spec}; all clients must create the same variables in the same order"
            )

    def _on_layout(self, peer: Peer, request: dict[str, Any], array: Any) -> tuple[Any, ...]:
        self._store.lay_out()
        buffers = self._store.buffers
        if request["maps"] and not buffers.admit(peer.number) and not self._has_warned:
            self._has_warned = True
            peer.connection.presence.control.warn(
                f"ps {self._number} has no memory for {len(self._peers) + 2} copies of its variables of "
                f"{buffers.layout.nbytes} bytes, which its clients on this node may need: pushes may wait for one{SEE}"
            )
        specs = [spec.described() for spec in buffers.layout.specs]
        return ({"number": self._store.layout_number, "path": buffers.path, "token": buffers.token, "specs": specs},)

    def _on_pull(self, peer: Peer, request: dict[str, Any], array: Any) -> tuple[Any, ...]:
        self._require_done(peer)
        buffers = self._store.buffers
        if buffers.count == 1:  # written in place
            self._store.require_whole(buffers.layout.index)
        versions = buffers.versions[buffers.current].tolist()
        content = {"layout": self._store.layout_number, "versions": versions}
        return content, buffers.bytes[buffers.current][: buffers.layout.nbytes]

    def _on_assign(self, peer: Peer, request: dict[str, Any], array: Any) -> None:
        self._store.assign(_key(request), request["how"], array)

    def _on_read(self, peer: Peer, request: dict[str, Any], array: Any) -> tuple[Any, ...]:
        self._require_done(peer)
        key = _key(request)
        return {"version": self._store.version(key)}, self._store.read(key)

    def _on_lookup(self, peer: Peer, request: dict[str, Any], array: Any) -> tuple[Any, ...]:
        self._require_done(peer)
        return {}, self._store.lookup(_key(request), array)

    def _on_scatter(self, peer: Peer, request: dict[str, Any], array: Any) -> None:
        spec = self._store.variables[_key(request)].spec
        count = request["count"]
        indices = array[: 8 * count].view(numpy.int64)
        rows = array[8 * count :].view(spec.dtype).reshape(count, *spec.shape[1:])
        self._store.scatter(spec.key, request["how"], indices, rows)

    # -- steps --------------------------------------------------------------------------------------------------------

    def _on_step(self, peer: Peer, request: dict[str, Any], array: Any) -> tuple[Any, ...]:
        self._require_done(peer)
        if request["pushed"] > self._consistency.permitted(peer.number):
            raise Waiting
        count = 1 + max(self._store.optimizers, default=-1)
        return ({"steps": self._progress.words[Ledger.steps_word(0) : Ledger.steps_word(count)].tolist()},)

    def _on_flush(self, peer: Peer, request: dict[str, Any], array: Any) -> None:
        self._require_done(peer)

    def _on_meet(self, peer: Peer, request: dict[str, Any], array: Any) -> tuple[Any, ...]:
        """Return the names of the clients that are here and have not asked for this meeting yet."""
        met = self._met.setdefault(request["number"], set())
        met.add(peer.number)
        return ({"absent": [each.name for each in self._peers if each.is_here and each.number not in met]},)

    def _on_plan(self, peer: Peer, request: dict[str, Any], array: Any) -> None:
        variables = self._store.variables
        dense, sparse = ([variables[key].spec for key in map(tuple, request[name])] for name in ("dense", "sparse"))
        narrow = None if request["push_dtype"] is None else numpy.dtype(request["push_dtype"])
        for number in request["forgotten"]:
            peer.plans.pop(number, None)
        plan = PushPlan(tuple(dense), tuple(sparse), narrow, request["digest"])
        peer.plans[request["number"]] = self._store.planned(plan)

    # -- optimizers ---------------------------------------------------------------------------------------------------

    def _on_register(self, peer: Peer, request: dict[str, Any], array: Any) -> None:
        number = request["number"]
        if number >= self._progress.most_optimizers:
            most = self._progress.most_optimizers
            raise ValueError(f"a server takes {most} optimizers, and this is number {number}")
        if number in self._store.optimizers:
            self._store.optimizers[number].require_same(bytes(array), peer.number)
        else:
            self._store.optimizers[number] = StoredOptimizer(bytes(array), number)
            self._progress.show_rule(number)

    def _on_rule(self, peer: Peer, request: dict[str, Any], array: Any) -> tuple[Any, ...]:
        """Return what a client needs to apply the gradients of a plan itself; nothing, if the server is to do it."""
        served = self._optimizer(request)
        if not served.is_ours:
            return ({},)
        self._store.make_room(request["number"], peer.plans[request["plan"]].plan)
        slots, place = served.slots, None
        if slots is not None:
            if not slots.path:
                return ({},)
            place = slots.path, slots.token
        return {"slots": place}, numpy.frombuffer(packed(served.optimizer), numpy.uint8)

    def _on_state(self, peer: Peer, request: dict[str, Any], array: Any) -> tuple[Any, ...]:
        self._require_done(peer)
        state = self._optimizer(request).state(self._store.buffers)
        arrays = {name: value for name, value in state.items() if isinstance(value, numpy.ndarray)}
        plain = {name: value for name, value in state.items() if name not in arrays}
        places, memory = protocol.joined(arrays)
        return {"plain": plain, "arrays": places}, memory

    def _on_restore(self, peer: Peer, request: dict[str, Any], array: Any) -> None:
        self._optimizer(request)
        arrays = protocol.parted(request["arrays"], array)
        try:
            self._store.restore(request["number"], {**request["plain"], **arrays})
        finally:  # however far it came
            self._progress.show_rule(request["number"])

    def _on_iterations(self, peer: Peer, request: dict[str, Any], array: Any) -> tuple[Any, ...]:
        self._require_done(peer)
        optimizer = self._optimizer(request).optimizer
        if request["value"] is not None:
            optimizer.iterations = request["value"]
            self._progress.show_steps(request["number"])
        return ({"iterations": optimizer.iterations, **optimizer._rate_to_save()},)

    def _on_skipped(self, peer: Peer, request: dict[str, Any], array: Any) -> tuple[Any, ...]:
        optimizer = self._optimizer(request)
        optimizer.skipped_steps += request["count"]
        return ({"skipped_steps": optimizer.skipped_steps},)

    def _on_rate(self, peer: Peer, request: dict[str, Any], array: Any) -> None:
        self._require_done(peer)
        optimizer = self._optimizer(request).optimizer
        if array is not None:
            optimizer.learning_rate = pickle.loads(bytes(array))
            self._progress.show_rule(request["number"])
        else:
            optimizer.learning_rate = request["value"]
            self._progress.show_rate(request["number"])

    def _optimizer(self, request: dict[str, Any]) -> StoredOptimizer:
        try:
            return self._store.optimizers[request["number"]]
        except KeyError:
            raise KeyError(f"there is no optimizer {request['number']} here") from None

    def _require_done(self, peer: Peer) -> None:
        """Raise Waiting while a push of this client is not done with: a client reads what it wrote."""
        if self._progress.words[peer.applied_word] < peer.arrived:
            raise Waiting


#: Requests that need no lock: those that change nothing, and `create`, whose variable nobody sees yet.
_READS = frozenset(("hello", "create", "pull", "step", "flush", "meet", "read", "plan", "state", "skipped"))


def _key(request: dict[str, Any]) -> Key:
    number, shard = request["key"]
    return number, shard
