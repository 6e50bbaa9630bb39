"""`Update`: what a push of one list of variables does, whoever carries it out: the server, or a client on its node."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy

from mpidist.optimizers.rule import Step
from mpidist.optimizers.slices import SLICE_ELEMENTS, compute_dtype
from mpidist.parameter_server.copies import Variables
from mpidist.parameter_server.layout import PushPlan, VariableSpec
from mpidist.parameter_server.served_optimizer import ServedOptimizer

#: Of how many payloads a run keeps views, and in memory of how many bytes at most: those from other nodes are new
#: arrays, and memory that has become too small is not to be held by lists that are not pushed again.
_KEPT_PAYLOADS, _KEPT_BYTES = 64, 1 << 18

_NOTHING: tuple[Any, list[Any]] = (None, [])


class _Slab:
    """A part of a run that fits into the cache with all that its update needs: by copy, by side, and scratch."""

    __slots__ = ("where", "copies", "sides", "scratch")

    def __init__(self, run: _PushedRun, where: slice, scratch: list[Any]) -> None:
        self.where = where
        self.copies = [each[where] for each in run.copies]
        self.sides = [[slot[where] for slot in slots] for slots in run.sides]
        self.scratch = [each[: where.stop - where.start] for each in scratch]


@dataclass
class _PushedRun:
    """Neighbours in a layout, and in a push, that one call updates."""

    section: int
    start: int
    stop: int
    wire: slice
    wire_dtype: numpy.dtype
    decay: float
    variable: VariableSpec | None
    copies: list[Any] = field(default_factory=list)
    sides: list[list[Any]] = field(default_factory=list)
    pieces: list[_Slab] = field(default_factory=list)
    _gradients: dict[int, tuple[Any, list[Any]]] = field(default_factory=dict)

    def gradients_in(self, payload: Any, keeps: bool) -> list[Any]:
        """Return the gradient of each piece, as views of a payload; kept where they come in the same few arrays."""
        payload_again, gradients = self._gradients.get(id(payload), _NOTHING)
        if payload_again is not payload:
            whole = payload[self.wire].view(self.wire_dtype)
            gradients = [whole[piece.where] for piece in self.pieces]
            memory = payload if payload.base is None else payload.base
            if keeps and memory.nbytes <= _KEPT_BYTES:
                if len(self._gradients) >= _KEPT_PAYLOADS:
                    self._gradients.clear()
                self._gradients[id(payload)] = payload, gradients
        return gradients


class Update:
    """What a push of one list of variables does with one optimizer and the present layout."""

    def __init__(
        self,
        served: ServedOptimizer,
        plan: PushPlan,
        copies: Variables,
    ) -> None:
        self.served, self._optimizer, self._number = served, served.optimizer, served.number
        self._copies, self._slots = copies, served.slots
        self._changed = copies.layout.places_of([spec.key for spec in plan.dense])
        self._flipped = 0 if self._slots is None or self._slots.count == 1 else 1 << self._number
        self._runs = self._found_runs(plan)
        for run in self._runs:
            self._complete(run)
        self.is_empty = not self._runs
        self._old_side = 0

    def _found_runs(self, plan: PushPlan) -> list[_PushedRun]:
        layout, runs = self._copies.layout, list[_PushedRun]()
        for spec, (number, at) in zip(plan.dense, plan.places, strict=True):
            if spec.key not in layout.index:
                continue
            wire, index = plan.sections[number], layout.index[spec.key]
            begin, end = (wire.start + (at + n) * wire.dtype.itemsize for n in (0, spec.size))
            section, first = layout.section_of[index], layout.first[index]
            decay = self._optimizer.decay_of(spec)
            run = _PushedRun(section, first, first + spec.size, slice(begin, end), wire.dtype, decay, spec)
            before = runs[-1] if runs and self.served.joins else None
            if before is not None and (before.section, before.stop, before.wire.stop) == (section, first, begin):
                if (before.decay, before.wire_dtype) == (decay, wire.dtype):
                    before.stop, before.wire = run.stop, slice(before.wire.start, end)
                    continue
            runs.append(run)
        return runs

    def _complete(self, run: _PushedRun) -> None:
        """Find the arrays of a run."""
        where, dtype = slice(run.start, run.stop), self._copies.layout.sections[run.section].dtype
        run.copies = [sections[run.section][0][where] for sections in self._copies.sections]
        sides = [] if self._slots is None else self._slots.sections
        run.sides = [[slot[where] for slot in sections[run.section]] for sections in sides] or [[], []]
        if self.served.joins:
            run.variable = None
            if not run.decay and self._optimizer.clipvalue is None:
                if run.wire_dtype == dtype == compute_dtype(dtype):
                    scratch = self.served.scratch_of(dtype)
                    size = run.stop - run.start
                    bounds = range(0, size, SLICE_ELEMENTS)
                    wheres = [slice(start, min(start + SLICE_ELEMENTS, size)) for start in bounds]
                    run.pieces = [_Slab(run, each, scratch) for each in wheres]

    # -- carrying it out, with the write lock ----------------------------------------------------------------------

    def write(self, payload: Any, rate: float, scale: float, iterations: int, keeps: bool = True) -> int:
        """Write a copy of the variables, and a side of the slots, and return the copy; they are not current yet.

        Views of the payload are kept for the next call if `keeps`: not of an array of the user, who lets go of it.
        """
        copies, slots, optimizer, renew = self._copies, self._slots, self._optimizer, self.served.renew_slice
        new = copies.begin(self._changed)
        if new < 0:
            return -1
        old = copies.current
        old_side = new_side = 0
        if self._flipped:
            assert slots is not None
            self._old_side = old_side = copies.side(self._number)
            new_side = 1 - old_side
            slots.prepare(old_side, new_side, self._changed)
        coefficients = optimizer.coefficients(rate, iterations)
        for run in self._runs:
            if run.pieces and scale == 1:
                for piece, gradient in zip(run.pieces, run.gradients_in(payload, keeps), strict=True):
                    after, before = piece.sides[new_side], piece.sides[old_side]
                    parameter = piece.copies[new]
                    if old == new:
                        optimizer.update_slice(parameter, gradient, after, piece.scratch, coefficients)
                    else:
                        renew(parameter, piece.copies[old], gradient, after, before, piece.scratch, coefficients)
            else:
                self._write_by_steps(run, (old, new), (old_side, new_side), payload, rate, coefficients, scale)
        return new

    def _write_by_steps(
        self,
        run: _PushedRun,
        copies: tuple[int, int],
        sides: tuple[int, int],
        payload: Any,
        rate: float,
        coefficients: tuple[float, ...],
        scale: float,
    ) -> None:
        """Copy and update a run; slice by slice where that may be, so that the copy is still in cache."""
        optimizer, gradient = self._optimizer, payload[run.wire].view(run.wire_dtype)
        old, new = (run.copies[each] for each in copies)
        before, after = (run.sides[each] for each in sides)
        if run.variable is None:
            step, length = Step(coefficients, scale, rate * run.decay), SLICE_ELEMENTS
        else:
            step, length = optimizer.step_of(run.variable, rate, coefficients, scale), max(new.size, 1)
        for start in range(0, new.size, length):
            where = slice(start, start + length)
            if old is not new:
                new[where] = old[where]
            if before is not after:
                for slot, one_before in zip(after, before, strict=True):
                    slot[where] = one_before[where]
            optimizer.update(new[where], gradient[where], [slot[where] for slot in after], step)

    def commit(self, copy: int) -> None:
        """Make the copy that `write` returned current, and the side of the slots with it."""
        copies, slots, changed, flipped = self._copies, self._slots, self._changed, self._flipped
        if not flipped:
            copies.commit(copy, changed)
            return
        assert slots is not None
        old = self._old_side
        slots.count_change(old, 1 - old, changed)
        copies.commit(copy, changed, flipped)
        slots.finish(1 - old)
