"""`Direct`: how a client on a server's node applies its gradients itself, in the server's memory.

A push by message costs two changes of process where ranks outnumber cores: to the server, and back.  What is to be done
may be less than that: an optimizer without slots reads one copy of the variables and writes another, both of which the
client has mapped.  So it takes the turn, does what the server would do, and is done: no message is sent, and nothing is
waited for but the turn, and what this client has sent by message before.

All else is the server's to do: slots (which are written in place, and would be torn by the death of the writer), rows,
tables, gradients in 16 bits, rules that are not this package's, and policies that hold clients back or gather.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy

from mpidist.parameter_server.published import Ledger
from mpidist.parameter_server.served_optimizer import Run, ServedOptimizer, StoredVariable
from mpidist.parameter_server.turn import Turn

if TYPE_CHECKING:
    from mpidist.parameter_server.push_part import Part
    from mpidist.parameter_server.server_end import NearServer

_LAYOUT, _RULES, _TORN, _PUSHES = Ledger.LAYOUT, Ledger.RULES, Ledger.TORN, Ledger.PUSHES

#: A gradient of one variable with more bytes is read where the user has it.
_PACKED_BYTES = 1 << 18

#: After how many pushes, or bytes, this client looks whether the others are still there.
_LOOK_PUSHES, _LOOK_BYTES = 64, 1 << 20


@dataclass
class _Target:
    """What a push of one list of variables means with one optimizer and the present layout.

    Attributes
    ----------
    optimizer : ServedOptimizer
    runs : list of Run
    changed : slice, array of int, or None
        Places in the layout of the variables that are written; None for all.
    payload : array of uint8
        Where gradients are packed.
    """

    optimizer: ServedOptimizer
    runs: list[Run]
    changed: Any
    payload: Any


class Direct:
    """A server's variables, as one client changes them itself.  All Local.

    Parameters
    ----------
    server : NearServer
    ledger : Ledger
    turn : Turn
    """

    def __init__(self, server: NearServer, ledger: Ledger, turn: Turn) -> None:
        self._server = server
        self._words, self._reals = ledger.words, ledger.reals
        self._turn = turn
        self._copies: Any = None
        self._layout = self._rules = -1
        #: By optimizer and plan; None where the server is to do it.
        self._targets: dict[tuple[int, int], _Target | None] = {}
        self._optimizers: dict[int, ServedOptimizer | None] = {}
        self._pushes = 0
        #: Where the gradients of any list are packed, one list at a time.
        self._packed = numpy.empty(0, numpy.uint8)

    def push(
        self, number: int, part: Part, gradients: Sequence[Any], rate: float, scale: float, are_checked: bool = True
    ) -> bool:
        """Apply gradients as one step of an optimizer; return False, with nothing done, if the server is to do it.

        Parameters
        ----------
        number : int
            Of the optimizer.
        part : Part
        gradients : sequence of array
            What ``part.chosen`` returned.
        rate : float
            NaN for the optimizer's own.
        scale : float
            What the gradients are multiplied by.
        are_checked : bool
            False if nobody has looked whether they fit: if not, nothing is done, either.
        """
        target = self.settle(number, part)
        if target is None:
            return False
        if are_checked:
            payload = _packed(part, gradients, target.payload)
        elif part.pack_unchecked(gradients, target.payload):
            payload = target.payload
        else:
            return False
        done = self._turn.during(self._apply, number, target, payload, rate, scale)
        self._look(payload.size)
        return done

    def settle(self, number: int, part: Part) -> _Target | None:
        """Return what `push` would change, None if nothing; wait until what went by message is applied, or raises."""
        if self._words[_TORN]:
            return None
        if not self._is_up_to_date():
            self._renew()
        try:
            target = self._targets[number, part.number]
        except KeyError:
            target = self._targets[number, part.number] = self._find(number, part)
        if target is not None:
            self._server.flush()
        return target

    def set_rate(self, number: int, value: float) -> bool:
        """Set the learning rate of an optimizer; return False, with nothing done, if the server is to do it."""
        if value != value:  # NaN means that the ledger does not have it
            return False
        self._server.flush()
        return self._turn.during(self._write_rate, number, value)

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

    def _apply(self, number: int, target: _Target, payload: Any, rate: float, scale: float) -> bool:
        if not self._is_up_to_date():
            return False
        words, copies, optimizer = self._words, self._copies, target.optimizer
        steps = Ledger.steps_word(number)
        optimizer.optimizer.iterations = words[steps]
        if rate != rate:  # NaN
            rate = self._reals[Ledger.rate_real(number)]
            if rate != rate:  # a function of the steps
                rate = optimizer.optimizer.learning_rate
        if target.runs:
            buffer = copies.begin(target.changed)
            if buffer < 0:
                return False
            try:
                optimizer.update(target.runs, copies.current, buffer, payload, rate, scale)
            except BaseException:
                copies.give_up(buffer)
                raise
            copies.commit(buffer, target.changed)
        words[_PUSHES] += 1  # first: a server that sees it takes over the steps, whatever they are
        words[steps] += 1
        return True

    def _look(self, nbytes: int) -> None:
        self._pushes += 1
        if nbytes > _LOOK_BYTES or not self._pushes % _LOOK_PUSHES:
            self._server.look()

    def forget_plan(self, number: int) -> None:
        """Forget what was found for a plan."""
        self._targets = {key: target for key, target in self._targets.items() if key[1] != number}

    def close(self) -> None:
        """Change nothing any more."""
        self._turn.close()

    # -- what is found once -------------------------------------------------------------------------------------------

    def _renew(self) -> None:
        """Forget what was found for another layout, or other rules."""
        self._rules = self._words[_RULES]
        self._copies, self._layout = self._server.newest()
        self._targets, self._optimizers = {}, {}

    def _find(self, number: int, part: Part) -> _Target | None:
        plan, copies = part.plan, self._copies
        if (
            plan.sparse
            or plan.push_dtype is not None
            or any(spec.key not in copies.layout.index for spec in plan.dense)
        ):
            return None
        optimizer = self._optimizer(number)
        if optimizer is None:
            return None
        runs = optimizer.runs(copies, plan, [StoredVariable(spec, None) for spec in plan.dense])
        changed = copies.layout.places_of([spec.key for spec in plan.dense])
        if self._packed.size < plan.dense_nbytes:
            self._packed = numpy.empty(plan.dense_nbytes, numpy.uint8)
            self._targets = {}  # which hold what was there, as do views
            self._server.views.clear()
        return _Target(optimizer, runs, changed, self._packed[: plan.dense_nbytes])

    def _optimizer(self, number: int) -> ServedOptimizer | None:
        """Return this process's copy of an optimizer's rule, None if only the server may apply it."""
        if number not in self._optimizers:
            _, content = self._server.ask("rule", number=number)
            self._optimizers[number] = None if content is None else ServedOptimizer(content.tobytes())
        return self._optimizers[number]


def _packed(part: Part, gradients: Sequence[Any], payload: Any) -> Any:
    """Return gradients as the bytes of a push: a large one where it lies, others packed into `payload`."""
    if len(gradients) == 1 and payload.size > _PACKED_BYTES and part.is_as_pushed(gradients[0]):
        return gradients[0].reshape(-1).view(numpy.uint8)
    part.pack(gradients, payload)
    return payload
