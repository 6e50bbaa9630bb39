"""Updates made slice by slice inside the all-reduce, each on one rank of a node, which alone keeps the slots for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import is_
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, ref

import numpy

from mpidist.collectives.reductions.update import FusedUpdate, PlannedUpdate, Slice
from mpidist.collectives.ways.pieces import Piece
from mpidist.optimizers.rule import Rule, Step
from mpidist.optimizers.slots import Slots
from mpidist.optimizers.updates.variable_list import VariableList

#: Parameters that are shorter than this on average are updated together, in a copy: that is quicker than one by one.
_SHORT_ELEMENTS = 1 << 13


class ShardedUpdates:
    """The sharded updates of one optimizer: one for each list of variables that is updated together.

    `slots` has those that are kept whole: those of a variable are either there or in slices, never both.
    """

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        # Those that have slots: a part of the optimizer's state.
        self._active: list[ShardedUpdate] = []
        # By the lists that the optimizer has met last, as long as it knows them.
        self._of_list: WeakKeyDictionary[VariableList, tuple[FusedUpdate, ShardedUpdate | None]] = WeakKeyDictionary()

    def plan(self, updates: FusedUpdate | None, gradients: Sequence[Any], listed: VariableList) -> ShardedUpdate | None:
        """Return the sharded update of the variables of a list, None where there is none.

        Collective when it first meets a list; slots that are kept otherwise move.
        """
        variables = listed.variables
        if updates is None or (updates.in_one_copy and any(each.one_copy is None for each in variables)):
            self.release(variables)
            return None
        known, sharded = self._of_list.get(listed, (None, None))
        if known != updates:
            sharded = next((each for each in self._active if each.is_of(updates, variables)), None)
            planned = updates.plan(gradients, listed.names) if sharded is None else None
            if planned is not None:
                kind = _OneCopyUpdate if updates.in_one_copy else ShardedUpdate
                sharded = kind(updates, planned, listed, self._slots)
        if sharded is None or not sharded.is_active:
            self.release(variables)
            if sharded is not None:
                sharded.take_slots()
                self._active += [sharded] if sharded.is_active else []
        if known != updates:
            self._of_list[listed] = updates, sharded
        return sharded

    def release(self, variables: Sequence[Any]) -> None:
        """Make the slots of these variables whole again, and of all that are in slices with them.

        Collective where they are not whole.
        """
        for each in [each for each in self._active if each.has_any(variables)]:
            each.give_slots_back()
            self._active.remove(each)
            self._of_list.clear()  # or it would be kept, with the slices

    def require_whole(self) -> None:
        """Raise TypeError where slots are in slices, of which this rank has some."""
        if self._active:
            raise TypeError(
                "each rank keeps a part of the slots of this optimizer, so it cannot be pickled on one; save what "
                "`Optimizer.state` returns, on all ranks"
            )

    def gathered(self) -> dict[int, list[Any]]:
        """Return the whole slots, flat, of the variables whose slots are in slices, by id; collective if there are."""
        found: dict[int, list[Any]] = {}
        for each in self._active:
            found.update(each.gathered())
        return found

    def forget(self) -> None:
        """Drop what is in slices: whole slots are about to be set.  Local."""
        self._active.clear()
        self._of_list.clear()


class ShardedUpdate:
    """The sharded update of some variables, and the slots for the slices that this rank owns."""

    def __init__(self, updates: FusedUpdate, planned: PlannedUpdate, listed: VariableList, slots: Slots) -> None:
        self._updates, self._slices = updates, planned.slices
        # From its first call on it is the table of bindings that keeps it.
        self._planned: Callable[[], PlannedUpdate | None] = lambda: planned
        self._variables, self._names = listed.variables, listed.names
        self._ids = frozenset(map(id, self._variables))
        self._slots = slots
        self._kept: list[list[Any]] | None = None
        self._transforms = list(map(self._transform, self._slices))

    def _transform(self, part: Slice) -> _SliceUpdate:
        return _SliceUpdate(part, self._variables)

    @property
    def is_active(self) -> bool:
        """Whether the slots of its variables are here, in slices."""
        return self._kept is not None

    def is_of(self, updates: FusedUpdate, variables: Sequence[Any]) -> bool:
        """Whether it updates these variables, and no others.  Local."""
        own = self._variables
        return updates == self._updates and len(own) == len(variables) and all(map(is_, own, variables))

    def has_any(self, variables: Sequence[Any]) -> bool:
        """Whether it updates one of these variables.  Local."""
        return not self._ids.isdisjoint(map(id, variables))

    def run(self, rule: Rule, gradients: Sequence[Any], steps: Sequence[Step]) -> None:
        """Sum the gradients over the replicas and update.  Collective."""
        planned = self._planned() or self._updates.plan(gradients, self._names)
        assert self._kept is not None and planned is not None  # there was one
        for transform, kept in zip(self._transforms, self._kept, strict=True):
            transform.set(rule, steps, kept)
        begun: list[bool] = []
        try:
            parameters = [variable.storage for variable in self._variables]
            seconds = self._updates.timeout_seconds
            planned.run(gradients, parameters, self._transforms, lambda: begun.append(True), seconds)
            self._planned = ref(planned)
            for variable in self._variables:
                variable.note_change()
        except BaseException as error:
            if begun:
                for variable in self._variables:
                    variable.tear(f"an update of it ended with {type(error).__name__}: {error}")
            raise

    def take_slots(self) -> None:
        """Take this rank's slices of the slots, and give up the rest.  Local."""
        self._kept = []
        for part in self._slices:
            members = [self._slots.of(self._variables[position]) for position in part.tensors]
            kept = [numpy.empty(sum(stop - start for start, stop in part.owned), part.dtype) for _ in self._slots.names]
            for number, values in enumerate(kept):
                done = 0
                for start, stop in part.owned:
                    part.pieces.gather(start, stop, [slots[number] for slots in members], values[done:][: stop - start])
                    done += stop - start
            self._kept.append(kept)
        for variable in self._variables:
            self._slots.give_up(variable)

    def gathered(self) -> dict[int, list[Any]]:
        """Return the whole slots of its variables by id.  Collective."""
        assert self._kept is not None
        slots: dict[int, list[Any]] = {}
        for part, kept in zip(self._slices, self._kept, strict=True):
            whole = [self._updates.gather(part, values) for values in kept]
            offsets = part.pieces.offsets
            for position, start, stop in zip(part.tensors, offsets[:-1], offsets[1:], strict=True):
                slots[id(self._variables[position])] = [values[start:stop] for values in whole]
        return slots

    def give_slots_back(self) -> None:
        """Make the slots whole.  Collective."""
        whole = self.gathered()
        for variable in self._variables:
            self._slots.take_back(variable, whole[id(variable)])


class _OneCopyUpdate(ShardedUpdate):
    """The same for variables of which the ranks share one copy, and so the slots: nothing moves."""

    def _transform(self, part: Slice) -> _SliceUpdate:
        return _OneCopySlice(part, self._variables, len(self._slots.names))

    @property
    def is_active(self) -> bool:
        """No: slots are not in slices."""
        return False

    def take_slots(self) -> None:
        """Look up the slots.  Collective where there are new ones."""
        slots = [self._slots.of(variable) for variable in self._variables]
        self._kept = [
            [[slots[position][number] for position in part.tensors] for number in range(len(self._slots.names))]
            for part in self._slices
        ]


class _Block(NamedTuple):
    """What is updated at once.  `where` lies in the gradients; `member` is the number of the variable."""

    where: slice
    parameter: Any
    slots: list[Any]
    scratch: list[Any]
    member: int


class _SliceUpdate:
    """What turns a slice of the summed gradients of one bucket into new parameters."""

    def __init__(self, part: Slice, variables: Sequence[Any]) -> None:
        self._pieces = part.pieces
        self._positions = part.tensors
        self._variables = [variables[position] for position in part.tensors]
        longest = max((stop - start for start, stop in part.owned), default=0)
        self._parameters = numpy.empty(longest, part.dtype)
        self._cut = part.cut
        self._starts = [start for start, _ in part.owned]
        self._rule: Rule
        self._steps: Sequence[Step]
        self._whole: list[Any] = []
        self._storages: list[Any] = []
        self._slots: dict[int, list[Any]] = {}
        self._kept: list[Any] | None = None
        self._blocks: dict[int, list[_Block]] = {}

    def set(self, rule: Rule, steps: Sequence[Step], kept: list[Any]) -> None:
        """Prepare a step: `steps` for all variables, `kept` this rank's slots."""
        self._rule, self._steps = rule, [steps[position] for position in self._positions]
        arrays = [variable.storage for variable in self._variables]
        if len(arrays) != len(self._whole) or not all(map(is_, arrays, self._whole)):
            self._whole, self._storages = arrays, [array.reshape(-1) for array in arrays]
            self._blocks.clear()
        if kept is not self._kept:
            cuts = [self._cut(values) for values in kept]
            self._slots = {start: [cut[n] for cut in cuts] for n, start in enumerate(self._starts)}
            self._kept = kept
            self._blocks.clear()
        self._as_they_are = all(map(rule._takes_unchanged, self._steps))

    def __call__(self, start: int, values: Any) -> None:
        """Update the parameters from element `start` on by the gradients `values`."""
        pieces, slots = self._pieces.within(start, start + len(values)), self._slots[start]
        steps, storages = self._steps, self._storages
        if self._are_crumbs(pieces, len(values)):
            parameters = self._parameters[: len(values)]
            self._pieces.gather(start, start + len(values), storages, parameters)
            self._rule.update(parameters, values, slots, steps[pieces[0].member])
            self._pieces.scatter(start, parameters, storages)
            return
        if self._as_they_are:
            update = self._rule._update_block
            for where, parameter, own_slots, scratch, member in self._blocks_from(start, pieces):
                update(parameter, values[where], own_slots, scratch, steps[member])
            return
        done = 0
        for piece in pieces:
            stop = done + piece.stop - piece.start
            parameters, gradient = storages[piece.member][piece.start : piece.stop], values[done:stop]
            self._rule.update(parameters, gradient, [slot[done:stop] for slot in slots], steps[piece.member])
            done = stop

    def _blocks_from(self, start: int, pieces: Sequence[Piece]) -> list[_Block]:
        """Return the blocks of the pieces from element `start` on; they are cut once."""
        blocks = self._blocks.get(start)
        if blocks is None:
            blocks, done, slots = [], 0, self._slots[start]
            for piece in pieces:
                stop = done + piece.stop - piece.start
                whole = self._storages[piece.member][piece.start : piece.stop]
                cut = self._rule._blocks(whole, [slot[done:stop] for slot in slots])
                for where, own, slots_there, scratch in cut:
                    there = slice(done + where.start, done + where.stop)
                    blocks.append(_Block(there, own, slots_there, scratch, piece.member))
                done = stop
            self._blocks[start] = blocks
        return blocks

    def _are_crumbs(self, pieces: Sequence[Piece], elements: int) -> bool:
        """Whether pieces are so short, and so alike, that they are better updated together in a copy."""
        first = self._steps[pieces[0].member]
        is_short = len(pieces) > 1 and elements < _SHORT_ELEMENTS * len(pieces)
        return is_short and all(self._steps[piece.member] == first for piece in pieces)


class _OneCopySlice(_SliceUpdate):
    """The same where slots are arrays of their variables' lengths."""

    def __init__(self, part: Slice, variables: Sequence[Any], slot_count: int) -> None:
        super().__init__(part, variables)
        self._copies = [self._parameters, *(numpy.empty_like(self._parameters) for _ in range(slot_count))]

    def set(self, rule: Rule, steps: Sequence[Step], kept: list[Any]) -> None:
        """Prepare a step: `steps` for all variables, `kept` the slots, by name and variable."""
        self._rule, self._steps = rule, [steps[position] for position in self._positions]
        self._storages = [variable.storage.reshape(-1) for variable in self._variables]
        self._arrays = [self._storages, *kept]

    def __call__(self, start: int, values: Any) -> None:
        """Update the parameters from element `start` on by the gradients `values`."""
        pieces, stop, steps = self._pieces.within(start, start + len(values)), start + len(values), self._steps
        if self._are_crumbs(pieces, len(values)):
            parameters, *slots = copies = [copy[: len(values)] for copy in self._copies]
            for arrays, copy in zip(self._arrays, copies, strict=True):
                self._pieces.gather(start, stop, arrays, copy)
            self._rule.update(parameters, values, slots, steps[pieces[0].member])
            for arrays, copy in zip(self._arrays, copies, strict=True):
                self._pieces.scatter(start, copy, arrays)
            return
        done = 0
        for piece in pieces:
            where, gradient = slice(piece.start, piece.stop), values[done : done + piece.stop - piece.start]
            parameter, *slots = [arrays[piece.member][where] for arrays in self._arrays]
            self._rule.update(parameter, gradient, slots, steps[piece.member])
            done += len(gradient)
