"""`Direct`: how a client on a server's node applies its gradients itself, in the server's memory.

A push by message costs two changes of process where ranks outnumber cores: to the server, and back.  What is to be done
may be less than that: read one copy of variables and slots and write another, both of which the client has mapped.  So
it takes the write lock and does what the server would do: no message is sent, and nothing is waited for but the lock,
and what this client has sent by message before.

All else is the server's to do: rows, tables, gradients in 16 bits, rules that are not this package's, and policies that
hold clients back or gather.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy

from mpidist.parameter_server.client.part import PushPart
from mpidist.parameter_server.copies import SlotCopies, mapped
from mpidist.parameter_server.ledger import Ledger
from mpidist.parameter_server.served_optimizer import ServedOptimizer
from mpidist.parameter_server.update import Update
from mpidist.parameter_server.write_lock import WriteLock

if TYPE_CHECKING:
    from mpidist.parameter_server.client.near_server import NearServer

_LAYOUT, _RULES, _TORN, _PUSHES = Ledger.LAYOUT, Ledger.RULES, Ledger.TORN, Ledger.PUSHES

#: A gradient of one variable with more bytes is read where the user has it.
_PACKED_BYTES = 1 << 18

#: After how many pushes, or bytes, this client looks whether the others are still there.
_LOOK_PUSHES, _LOOK_BYTES = 64, 1 << 20


class Direct:
    """A server's variables, as one client changes them itself.  All Local."""

    def __init__(self, server: NearServer, ledger: Ledger, lock: WriteLock) -> None:
        self._server = server
        self._words, self._reals = ledger.words, ledger.reals
        self._lock = lock
        self._copies: Any = None
        self._layout = self._rules = -1
        self._optimizers: dict[int, ServedOptimizer] = {}
        self._pushes = 0
        #: Where the gradients of any list are packed, one list at a time.
        self._packed = numpy.empty(0, numpy.uint8)

    def push(self, number: int, part: PushPart, gradients: Sequence[Any], scale: float) -> bool:
        """Apply gradients as one step of an optimizer; return False, with nothing done, if the server is to do it."""
        update = self.settle(number, part)
        if update is None:
            return False
        if len(gradients) == 1 and part.nbytes > _PACKED_BYTES and part.is_as_pushed(gradients[0]):
            payload = gradients[0].reshape(-1).view(numpy.uint8)
        else:
            payload = self._packed
            part.pack(gradients, payload)
        done = self._lock.holding(self._apply, update, payload, scale)
        self._pushes += 1
        if part.nbytes > _LOOK_BYTES or not self._pushes % _LOOK_PUSHES:
            self._server.look()
        return done

    def settle(self, number: int, part: PushPart) -> Update | None:
        """Return what `push` would do, None if nothing; wait until what went by message is applied, or raises."""
        if self._words[_TORN]:
            return None
        if not self._is_up_to_date():
            self._renew()
        try:
            update = part.updates[number]
        except KeyError:
            update = part.updates[number] = self._find(number, part)
        if update is not None:
            self._server.flush()
        return update

    def set_rate(self, number: int, value: float) -> bool:
        """Set the learning rate of an optimizer; return False, with nothing done, if the server is to do it."""
        if value != value:  # NaN means that the ledger does not have it
            return False
        self._server.flush()
        return self._lock.holding(self._write_rate, number, value)

    def _write_rate(self, number: int, value: float) -> bool:
        real = Ledger.rate_real(number)
        is_plain = self._words[Ledger.steps_word(number)] >= 0 and self._reals[real] == self._reals[real]
        if is_plain:
            self._words[Ledger.RATES] += 1  # first: a server that sees it looks, whatever there is
            self._reals[real] = value
        return is_plain

    def _is_up_to_date(self) -> bool:
        """Whether what was found still holds, and nothing is torn, which the server has words for."""
        words = self._words
        return words[_LAYOUT] == self._layout and words[_RULES] == self._rules and not words[_TORN]

    def _apply(self, update: Update, payload: Any, scale: float) -> bool:
        if not self._is_up_to_date():
            return False
        words, served = self._words, update.served
        steps = served.steps_word
        rate = self._reals[served.rate_real]
        if rate != rate:  # NaN
            served.optimizer.iterations = words[steps]
            rate = served.optimizer.learning_rate
        if not update.is_empty:
            copy = update.write(payload, rate, scale, words[steps], payload is self._packed)
            if copy < 0:
                return False
            update.commit(copy)
        words[_PUSHES] += 1  # first: a server that sees it takes over the steps, whatever they are
        words[steps] += 1
        return True

    def close(self) -> None:
        """Change nothing any more."""
        self._drop_updates()
        self._lock.close()

    def _drop_updates(self) -> None:
        for part in self._server.parts:
            part.updates.clear()

    # -- what is found once -------------------------------------------------------------------------------------------

    def _renew(self) -> None:
        """Forget what was found for another layout, or other rules."""
        self._rules = self._words[_RULES]
        self._copies, self._layout = self._server.newest()
        self._drop_updates()
        self._optimizers = {}

    def _find(self, number: int, part: PushPart) -> Update | None:
        plan, copies = part.plan, self._copies
        index = copies.layout.index
        if plan.sparse or plan.push_dtype is not None or any(spec.key not in index for spec in plan.dense):
            return None
        served = self._optimizer(number, part)
        if served is None:
            return None
        if self._packed.size < plan.dense_nbytes:
            self._packed = numpy.empty(plan.dense_nbytes, numpy.uint8)
            self._drop_updates()  # which have views of what was there
            self._server.drop_views()
        return Update(served, plan, copies)

    def _optimizer(self, number: int, part: PushPart) -> ServedOptimizer | None:
        """Return this process's copy of an optimizer's rule, None if only the server may apply it."""
        known = self._optimizers.get(number)
        if known is not None and known.slots is None:
            return known
        answer, content = self._server.ask("rule", number=number, plan=part.number)  # which makes room for slots
        if content is None:
            return None
        if number not in self._optimizers:
            served = ServedOptimizer(content.tobytes(), number)
            if answer["slots"]:
                try:
                    names, layout = served.optimizer.slot_names, self._copies.layout
                    served.slots = SlotCopies(layout, names, 2, mapped(*answer["slots"]))
                except FileNotFoundError:  # they lie elsewhere by now: the next push finds them
                    return None
            self._optimizers[number] = served
        return self._optimizers[number]
