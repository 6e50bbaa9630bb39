"""`PushPart`: what goes to one server of the gradients of one list of variables, and how they are packed."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter, itemgetter
from typing import Any

import numpy

from mpidist.collectives.reductions.rows import Rows
from mpidist.parameter_server.layout import Key, PushPlan, VariableSpec
from mpidist.parameter_server.protocol import PushHeader
from mpidist.parameter_server.update import Update
from mpidist.variables import IndexedSlices

_SHAPE = attrgetter("shape")

#: The largest number of a dtype that gradients may be rounded to, where that is less than float32's.
_LIMITS = {"float16": 65504.0}


class Residues:
    """What rounding has lost of the gradients of each variable: a part of its next gradient, in whichever list.

    It has been multiplied by the scale of its push: the next gradient may have another, of the loss or of a norm.
    Variables of one list lie side by side, so that they are rounded together.
    """

    def __init__(self) -> None:
        #: By variable: memory, and its first element there.
        self._places: dict[Key, tuple[Any, int]] = {}

    def drop(self) -> None:
        """Owe nothing any more of what was pushed."""
        for memory, _ in self._places.values():
            memory[...] = 0

    def of(self, specs: Sequence[VariableSpec]) -> list[tuple[int, Any]]:
        """Return the residues of variables of one dtype: those of neighbours as one array, with their number."""
        new = [spec for spec in specs if spec.key not in self._places]
        memory, filled = numpy.zeros(sum(spec.size for spec in new), specs[0].dtype), 0
        for spec in new:
            self._places[spec.key] = memory, filled
            filled += spec.size
        runs: list[tuple[int, Any, int, int]] = []
        for spec in specs:
            memory, first = self._places[spec.key]
            if runs and runs[-1][1] is memory and runs[-1][3] == first:
                count, _, first, _ = runs.pop()
                runs.append((count + 1, memory, first, self._places[spec.key][1] + spec.size))
            else:
                runs.append((1, memory, first, first + spec.size))
        return [(count, memory[first:stop]) for count, memory, first, stop in runs]


class PushPart:
    """What goes to one server of the gradients of one list of variables."""

    def __init__(
        self,
        number: int,
        plan: PushPlan,
        dense: list[int],
        sparse: list[int],
        residues: Residues,
        forgotten: list[int],
    ) -> None:
        self.number = number
        #: The server's, which is told that this plan is not used any more.
        self._forgotten = forgotten
        #: The few arrays that gradients are packed in, each with its sections.
        self.views: list[tuple[Any, list[Any]]] = []
        #: By optimizer: what `Direct` does for it; None where the server is to do it.
        self.updates: dict[int, Update | None] = {}
        self.plan = plan
        self.sparse = sparse
        self.nbytes = plan.dense_nbytes
        self._shapes = tuple(spec.shape for spec in plan.dense)
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
        self._rows: Rows | None = None
        if self._is_all and len(dense) > 1 and len(wide) == 1 and self._lost[0] is None:
            self._rows = Rows.like(self._shapes)
        # What the last header says, which most of them say again.
        self._said: tuple[int, int, float] | None = None
        self._header = b""

    def __del__(self) -> None:
        self._forgotten.append(self.number)

    def chosen(self, gradients: Sequence[Any]) -> Sequence[Any]:
        """Return the gradients of whole variables that go to this server, in order."""
        if self._is_all and len(gradients) == len(self._dense):
            return gradients
        if self._take is not None:
            return self._take(gradients)
        return [gradients[place] for place in self._dense]

    def check(self, chosen: Sequence[Any]) -> None:
        """Raise ValueError unless gradients have their variables' shapes."""
        if tuple(map(_SHAPE, chosen)) != self._shapes:
            for gradient, spec in zip(chosen, self.plan.dense, strict=True):
                if gradient.shape != spec.shape:
                    raise ValueError(f"a gradient of shape {gradient.shape} was pushed for {spec}")

    def header(self, optimizer: int, seen: int, scale: float, counts: tuple[int, ...] = ()) -> bytes:
        """Return the header of a push."""
        if counts:
            return PushHeader(optimizer, self.number, seen, scale, counts).pack()
        said = (optimizer, seen, scale)
        if said != self._said:
            self._said, self._header = said, PushHeader(optimizer, self.number, seen, scale).pack()
        return self._header

    def is_as_pushed(self, gradient: Any) -> bool:
        """Whether a push of one variable has just the bytes of this gradient."""
        if not self._is_single or gradient.dtype != self.plan.dense[0].dtype or not gradient.flags.c_contiguous:
            return False
        return gradient.shape == self._shapes[0]

    def pack(self, chosen: Sequence[Any], array: Any, scale: float = 1.0) -> None:
        """Copy gradients of whole variables, to be multiplied by `scale`, to where a push has them, such as an area."""
        targets = self._targets_in(array)
        if self._rows is not None and self._rows.pack(chosen, targets[0]):
            return
        self.check(chosen)
        if self._is_single:
            targets[0][...] = chosen[0]
            return
        first = 0
        for target, count, lost in zip(targets, self._counts, self._lost, strict=True):
            some = chosen[first : first + count]
            first += count
            if lost is not None:
                _pack_narrow(some, target, lost, scale)
            elif count == 1:
                target[...] = some[0]
            else:
                numpy.concatenate(some, axis=None, out=target)

    def pack_rows(self, rows: Sequence[IndexedSlices], counts: Sequence[int], array: Any) -> None:
        """Copy rows, so many of each variable, to where a push has them."""
        places = self.plan.row_places(counts)
        for each, spec, (numbers, where) in zip(rows, self.plan.sparse, places, strict=True):
            array[numbers].view(numpy.int64)[...] = each.indices
            dtype = self.plan.wire_dtype(spec)
            values = each.values.reshape(-1)
            array[where].view(dtype)[...] = values if dtype == spec.dtype else _within(values, dtype)

    def _targets_in(self, array: Any) -> list[Any]:
        """Return the sections of an area, as views that are made once for each of the few areas."""
        for known, targets in self.views:
            if known is array:
                return targets
        targets, first = [section.of(array) for section in self.plan.sections], 0
        for number, (count, lost) in enumerate(zip(self._counts, self._lost, strict=True)):
            if count == 1 and lost is None:
                targets[number] = targets[number].reshape(self._shapes[first])
            first += count
        self.views = [*self.views[-3:], (array, targets)]
        return targets


def _pack_narrow(gradients: Sequence[Any], target: Any, residues: Sequence[tuple[int, Any]], scale: float) -> None:
    """Round gradients to fewer bits, neighbours together."""
    first = start = 0
    for count, lost in residues:
        _round(gradients[first : first + count], target[start : start + lost.size], lost, scale)
        first, start = first + count, start + lost.size


def _round(gradients: Sequence[Any], target: Any, lost: Any, scale: float) -> None:
    """Round gradients to fewer bits, with what was lost the last time; keep what is lost now."""
    wide = numpy.concatenate([each.astype(lost.dtype, copy=False) for each in gradients], axis=None)
    if not scale:  # nothing is lost of what counts for nothing
        target[...] = _within(wide, target.dtype)
        return
    wide += lost if scale == 1 else lost / lost.dtype.type(scale)
    target[...] = _within(wide, target.dtype)
    with numpy.errstate(invalid="ignore"):
        numpy.subtract(wide, target.astype(lost.dtype), out=lost)
        if scale != 1:
            lost *= lost.dtype.type(scale)
    lost[~numpy.isfinite(lost)] = 0  # of what is no number, nothing sensible is left


def _within(wide: Any, dtype: numpy.dtype) -> Any:
    """Return numbers cut off at the largest one of a dtype of fewer bits; what is infinite stays so."""
    limit = _LIMITS.get(dtype.name)
    if limit is None:
        return wide
    found = numpy.clip(wide, -limit, limit)
    numpy.copyto(found, wide, where=numpy.isinf(wide))
    return found
