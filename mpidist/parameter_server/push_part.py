"""`PlannedList`: what goes to each server of the gradients of one list of variables; `Part`: what goes to one."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter, itemgetter
from typing import Any

import numpy

from mpidist.collectives.rows import Rows
from mpidist.parameter_server.layout import Key, Plan, VariableSpec
from mpidist.parameter_server.protocol import PushHeader
from mpidist.parameter_server.server_end import ServerEnd
from mpidist.transports.connections.base import Area
from mpidist.variables import IndexedSlices

_SHAPE = attrgetter("shape")


#: The largest number of a dtype that gradients may be rounded to, where that is less than float32's.
_LIMITS = {"float16": 65504.0}


class Residues:
    """What rounding has lost of the gradients of each variable: a part of its next gradient, in whichever list.

    Variables of one list lie side by side, so that they are rounded together.
    """

    def __init__(self) -> None:
        #: By variable: memory, and its first element there.
        self._places: dict[Key, tuple[Any, int]] = {}

    def of(self, specs: Sequence[VariableSpec]) -> list[tuple[int, Any]]:
        """Return the residues of variables of one dtype: those of neighbours as one array, with their number."""
        new = [spec for spec in specs if spec.key not in self._places]
        memory, filled = numpy.zeros(sum(spec.size for spec in new), specs[0].dtype), 0
        for spec in new:
            self._places[spec.key] = memory, filled
            filled += spec.size
        found: list[tuple[int, Any, int, int]] = []
        for spec in specs:
            memory, first = self._places[spec.key]
            if found and found[-1][1] is memory and found[-1][3] == first:
                count, _, first, _ = found.pop()
                found.append((count + 1, memory, first, self._places[spec.key][1] + spec.size))
            else:
                found.append((1, memory, first, first + spec.size))
        return [(count, memory[first:stop]) for count, memory, first, stop in found]


class Part:
    """What goes to one server of the gradients of one list of variables.

    Parameters
    ----------
    server : ServerEnd
    number : int
        Of the plan at this server.
    plan : Plan
    dense, sparse : list of int
        Places in the user's list, in the plan's order.
    residues : Residues
    """

    def __init__(
        self, server: ServerEnd, number: int, plan: Plan, dense: list[int], sparse: list[int], residues: Residues
    ) -> None:
        self.server = server
        self.number = number
        self.plan = plan
        self.sparse = sparse
        self.shapes = tuple(spec.shape for spec in plan.dense)
        self.nbytes = plan.dense_nbytes
        self._dense = dense
        self._take = itemgetter(*dense) if len(dense) > 1 else None
        self._is_all = dense == list(range(len(dense))) and not sparse
        numbers = [number for number, _ in plan.places]
        self._counts = [numbers.count(number) for number in range(len(plan.sections))]
        wide = [plan.dense[numbers.index(number)].dtype for number in range(len(plan.sections))]
        #: By section: what was lost when gradients were rounded; None where they are not.
        self._lost = [
            residues.of([spec for spec in plan.dense if spec.dtype == dtype]) if section.dtype != dtype else None
            for section, dtype in zip(plan.sections, wide, strict=True)
        ]
        self._is_single = len(dense) == 1 and self._lost[0] is None
        #: For gradients that differ in the length of their first axis at most: they are checked as they are packed.
        self.rows: Rows | None = None
        if self._is_all and len(dense) > 1 and len(wide) == 1 and self._lost[0] is None:
            self.rows = Rows.like(self.shapes)
        # What the last header says, which most of them say again.
        self._said: tuple[int, int, float, float] | None = None
        self._header = b""

    def __del__(self) -> None:
        self.server.forget_plan(self.number)

    def chosen(self, gradients: Sequence[Any]) -> Sequence[Any]:
        """Return the gradients of whole variables that go to this server, in order.

        Raises
        ------
        ValueError
            One does not have its variable's shape.
        """
        if self._is_all and len(gradients) == len(self._dense):
            some = gradients
        elif self._take is not None:
            some = self._take(gradients)
        else:
            some = [gradients[place] for place in self._dense]
        if tuple(map(_SHAPE, some)) != self.shapes:
            self._check(some)
        return some

    def message(
        self, optimizer: int, some: Sequence[Any], gradients: Sequence[Any], rate: float, scale: float
    ) -> tuple[bytes, Area, int]:
        """Return a push to this server: header, area, size in bytes.

        Parameters
        ----------
        optimizer : int
        some : sequence of array
            What `chosen` returned.
        gradients : sequence
            All of them; rows are taken from here.
        rate, scale : float
        """
        server = self.server
        seen = server.steps_of(optimizer) if server.gathers else 0
        if self.sparse:
            rows = [gradients[place].coalesced() for place in self.sparse]
            return self._message_with_rows(PushHeader(optimizer, self.number, seen, rate, scale), some, rows)
        said = (optimizer, seen, rate, scale)
        if said != self._said:
            self._said, self._header = said, PushHeader(optimizer, self.number, seen, rate, scale).pack()
        area = server.area(self.nbytes)
        self.pack(some, area.array)
        return self._header, area, self.nbytes

    def _message_with_rows(
        self, header: PushHeader, some: Sequence[Any], rows: Sequence[IndexedSlices]
    ) -> tuple[bytes, Area, int]:
        counts = tuple(len(each.indices) for each in rows)
        nbytes = self.plan.nbytes(counts)
        area = self.server.area(nbytes)
        self.pack(some, area.array)
        places = self.plan.row_places(counts)
        for each, spec, (numbers, where) in zip(rows, self.plan.sparse, places, strict=True):
            area.array[numbers].view(numpy.int64)[...] = each.indices
            dtype = self.plan.wire_dtype(spec)
            values = each.values.reshape(-1)
            area.array[where].view(dtype)[...] = values if dtype == spec.dtype else _within(values, dtype)
        return header._replace(counts=counts).pack(), area, nbytes

    def is_as_pushed(self, gradient: Any) -> bool:
        """Whether a push of one variable has just the bytes of this gradient."""
        return self._is_single and gradient.dtype == self.plan.dense[0].dtype and gradient.flags.c_contiguous

    def pack_unchecked(self, gradients: Sequence[Any], array: Any) -> bool:
        """Do as `pack` with gradients of which nobody has looked whether they fit; return whether they did.

        Only where there are `rows`.
        """
        assert self.rows is not None
        return self.rows.pack(gradients, self._targets_in(array)[0])

    def pack(self, gradients: Sequence[Any], array: Any) -> None:
        """Copy gradients of whole variables to where a push has them, such as the memory of an area."""
        if self._is_single:
            self._targets_in(array)[0][...] = gradients[0]
            return
        first = 0
        for target, count, lost in zip(self._targets_in(array), self._counts, self._lost, strict=True):
            some = gradients[first : first + count]
            first += count
            if lost is not None:
                _pack_narrow(some, target, lost)
            elif count == 1:
                target[...] = some[0]
            else:
                numpy.concatenate(some, axis=None, out=target)

    def _targets_in(self, array: Any) -> list[Any]:
        """Return the sections of an area, as views that are made once for each of the few areas."""
        views = self.server.views.get(self.number, [])
        for known, targets in views:
            if known is array:
                return targets
        targets, first = [section.of(array) for section in self.plan.sections], 0
        for number, (count, lost) in enumerate(zip(self._counts, self._lost, strict=True)):
            if count == 1 and lost is None:
                targets[number] = targets[number].reshape(self.shapes[first])
            first += count
        self.server.views[self.number] = [*views[-3:], (array, targets)]
        return targets

    def _check(self, gradients: Sequence[Any]) -> None:
        for gradient, spec in zip(gradients, self.plan.dense, strict=True):
            if gradient.shape != spec.shape:
                raise ValueError(f"a gradient of shape {gradient.shape} was pushed for {spec}")


class PlannedList:
    """What goes to each server of the gradients of one list of variables.

    No cycle of references leads back to it: when the client drops it, its parts say so to their servers.

    Attributes
    ----------
    key, nbytes, last_call
        For the `PlanCache`.
    parts : list of Part
    """

    def __init__(self, key: Any, parts: list[Part]) -> None:
        self.key = key
        self.parts = parts
        # a server that gathers has memory for the mean of a list's gradients
        self.nbytes = sum(part.plan.own_nbytes + part.nbytes * part.server.gathers for part in parts)
        self.last_call = 0


def _pack_narrow(gradients: Sequence[Any], target: Any, residues: Sequence[tuple[int, Any]]) -> None:
    """Round gradients to fewer bits, neighbours together."""
    first = start = 0
    for count, lost in residues:
        _round(gradients[first : first + count], target[start : start + lost.size], lost)
        first, start = first + count, start + lost.size


def _round(gradients: Sequence[Any], target: Any, lost: Any) -> None:
    """Round gradients to fewer bits, with what was lost the last time; keep what is lost now."""
    wide = numpy.concatenate([each.astype(lost.dtype, copy=False) for each in gradients], axis=None)
    wide += lost
    target[...] = _within(wide, target.dtype)
    with numpy.errstate(invalid="ignore"):
        numpy.subtract(wide, target.astype(lost.dtype), out=lost)
    lost[~numpy.isfinite(lost)] = 0  # of what is no number, nothing sensible is left


def _within(wide: Any, dtype: numpy.dtype) -> Any:
    """Return numbers cut off at the largest one of a dtype of fewer bits."""
    limit = _LIMITS.get(dtype.name)
    return wide if limit is None else numpy.clip(wide, -limit, limit)
