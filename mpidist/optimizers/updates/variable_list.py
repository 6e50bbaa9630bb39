"""`VariableList`: some variables that are updated together, and what does not change from step to step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from operator import attrgetter, is_
from typing import Any, NamedTuple

import numpy

from mpidist.arrays import aligned
from mpidist.collectives.reductions import update
from mpidist.collectives.reductions.results import Packed
from mpidist.device.memory import JointUpdate, memory_of
from mpidist.optimizers.rule import Rule
from mpidist.optimizers.slots import Slots
from mpidist.optimizers.sparse import values_of
from mpidist.variables import SplitVariable

#: Gradients that are shorter than this on average are packed, to be applied in few calls.
_SHORT_BYTES = 1 << 14

#: Lists of short gradients are cut into slices for the ranks from so many times as many bytes on as other lists.
_LIGHTER = 4

#: Lists that an optimizer keeps; another one is looked at anew.
_KEPT_LISTS = 8

_ARRAYS = {numpy.ndarray}
_shape, _dtype, _array_type = attrgetter("shape"), attrgetter("dtype"), attrgetter("array_type")


class Run(NamedTuple):
    """Neighbours, in memory and among the packed gradients, that are updated alike.

    `where` lies in the packed gradients; `member` is the position of the first of them in the list.
    """

    where: slice
    parameter: Any
    slots: list[Any]
    member: int


class VariableList:
    """Some variables, in an order.

    `has_copies`: this rank has a copy of its own of each.  `is_packed`: its gradients are packed.  `is_light`: every
    rank applies all packed gradients, which for short lists is quicker than slices.  `is_split`: some are split over
    the ranks of a replica.  `is_on_device`: all are arrays of one kind that is not NumPy's.

    ValueError where a variable comes twice: its second step would begin with what the first has made of it.
    """

    def __init__(self, variables: Sequence[Any]) -> None:
        self.variables = list(variables)
        self.names = [variable.name for variable in variables]
        require_once(self.variables, "has two gradients in one step; add them, and give their sum")
        self._shapes, self._dtypes = list(map(_shape, variables)), list(map(_dtype, variables))
        self._types = set(map(_array_type, variables))
        self._there: Any = next((each for each in variables if not issubclass(each.array_type, numpy.ndarray)), None)
        sizes = zip(self._shapes, self._dtypes, strict=True)
        nbytes = sum(math.prod(shape) * dtype.itemsize for shape, dtype in sizes)
        self.has_copies = all(variable.one_copy is None for variable in variables)
        self.is_packed = self.has_copies and len(variables) > 1 and nbytes < _SHORT_BYTES * len(variables)
        self.is_light = self.is_packed and nbytes < _LIGHTER * update.LEAST_BYTES
        self.is_split = any(isinstance(variable, SplitVariable) for variable in variables)
        self.is_on_device = len(self._types) == 1 and not issubclass(next(iter(self._types)), numpy.ndarray)
        self._runs: tuple[Any, list[list[Run]]] = (None, [])
        self._joint: tuple[Any, JointUpdate | None] = (None, None)
        self._decays: tuple[Any, list[float]] = (None, [])
        self._packs: list[Packed] = []
        self._packed_dtypes: list[Any] = []

    def is_of(self, variables: Sequence[Any]) -> bool:
        """Whether these are the same objects in the same order."""
        own = self.variables
        return variables is own or (len(variables) == len(own) and all(map(is_, variables, own)))

    def takes(self, gradients: Sequence[Any]) -> bool:
        """Whether these are arrays of the one kind that the variables have, of their shapes and dtypes."""
        return (
            set(map(type, gradients)) == self._types
            and len(self._types) == 1
            and list(map(_shape, gradients)) == self._shapes
            and list(map(_dtype, gradients)) == self._dtypes
        )

    def enter(self) -> None:
        """Begin a step on them behind the work that was begun before, in whichever stream of a device.  Local."""
        memory = None if self._there is None else memory_of(self._there.live)
        if memory is not None:
            memory.enter([self._there.live])

    def decays(self, rule: Rule) -> list[float]:
        """Return the weight decay of each variable: the same object as long as nothing is set anew."""
        key = rule.weight_decay, len(rule._without_decay)
        if self._decays[0] != key:
            self._decays = key, [rule.decay_of(variable) for variable in self.variables]
        return self._decays[1]

    def packed(self, gradients: Sequence[Any]) -> list[Packed]:
        """Return gradients as they are; short ones packed, in memory that the next call uses again."""
        if not self.is_packed or set(map(type, gradients)) != _ARRAYS:
            return [Packed((place,), (0, values_of(each).size), each) for place, each in enumerate(gradients)]
        dtypes = list(map(_dtype, gradients))
        if dtypes != self._packed_dtypes:
            self._packs, self._packed_dtypes = _room_for(gradients), dtypes
        for pack in self._packs:
            members = [gradients[position] for position in pack.tensors]
            numpy.concatenate(members, axis=None, out=pack.values)
        return self._packs

    def runs(self, packs: Sequence[Packed], slots: Slots, likeness: Sequence[Any]) -> list[list[Run]]:
        """Return the runs of each pack; variables of another `likeness` are in another run."""
        key = slots, slots.version, likeness, [(pack.tensors, pack.offsets) for pack in packs]
        if self._runs[0] != key:
            self._runs = key, [list(self._cut(pack, slots, likeness)) for pack in packs]
        return self._runs[1]

    def joint_update(self, runs: list[list[Run]]) -> JointUpdate | None:
        """Return the update of all runs at once, where the memory has such a thing; `runs` as `runs` returned."""
        if not self.is_on_device:
            return None
        if self._joint[0] is not runs:
            parameters, slots = zip(*((run.parameter, run.slots) for own in runs for run in own), strict=True)
            memory = memory_of(parameters[0])
            self._joint = runs, None if memory is None else memory.joint_update(parameters, slots)
        return self._joint[1]

    def _cut(self, pack: Packed, slots: Slots, likeness: Sequence[Any]) -> Iterator[Run]:
        """Yield the runs of one pack."""
        own = [slots.of(self.variables[position]) for position in pack.tensors]
        slices = [self.variables[position].block_slice for position in pack.tensors]
        joins = [False]
        for (a, b), (first, second) in zip(pairwise(pack.tensors), pairwise(slices), strict=True):
            is_next = first is not None and second is not None and first.block is second.block
            joins.append(is_next and first.stop == second.start and likeness[a] == likeness[b])
        begins = [number for number, is_joined in enumerate(joins) if not is_joined]
        for begin, end in pairwise([*begins, len(joins)]):
            where, member = slice(pack.offsets[begin], pack.offsets[end]), pack.tensors[begin]
            block_slice = slices[begin]
            if block_slice is None or end == begin + 1:
                yield Run(where, self.variables[member].storage.reshape(-1), own[begin], member)
                continue
            block, there = block_slice.block, slice(block_slice.start, slices[end - 1].stop)
            yield Run(where, block[there], [slot[there] for slot in slots.beside(block)], member)


class VariableLists:
    """The lists that one optimizer has met last."""

    def __init__(self) -> None:
        self._lists: list[VariableList] = []
        #: What was looked at last, and where: the same list needs no other look there.
        self.checked: tuple[Any, VariableList | None] = (None, None)

    def of(self, variables: Sequence[Any]) -> VariableList:
        """Return the list of these variables."""
        for known in self._lists:
            if known.is_of(variables):
                break
        else:
            known = VariableList(variables)
            self._lists = [known, *self._lists[: _KEPT_LISTS - 1]]
        return known

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle and copy without the lists, which are true of these variables only."""
        return type(self), ()


def require_once(variables: Sequence[Any], why: str) -> None:
    """Raise ValueError, with the reason, if a variable comes twice.  Local."""
    met: set[int] = set()
    for variable in variables:
        if id(variable) in met:
            raise ValueError(f"variable {variable.name!r} {why}")
        met.add(id(variable))


def unpacked(packs: Sequence[Packed]) -> list[Any]:
    """Return packed gradients one by one, in the order of the list, flat or as they are."""
    by_position: dict[int, Any] = {}
    for pack in packs:
        if len(pack.tensors) == 1:
            by_position[pack.tensors[0]] = pack.values
            continue
        for position, (start, stop) in zip(pack.tensors, pairwise(pack.offsets), strict=True):
            by_position[position] = pack.values[start:stop]
    return [by_position[position] for position in range(len(by_position))]


def gradients_of(packs: Sequence[Packed], runs: Sequence[Sequence[Run]]) -> Iterator[Any]:
    """Yield the packed gradients of each run, in no shape of their own."""
    for pack, own in zip(packs, runs, strict=True):
        if len(own) == 1:
            yield pack.values
        else:
            yield from (pack.values[run.where] for run in own)


def _room_for(gradients: Sequence[Any]) -> list[Packed]:
    """Return memory to pack gradients into, dtype by dtype."""
    positions: dict[Any, list[int]] = {}
    for position, gradient in enumerate(gradients):
        positions.setdefault(gradient.dtype, []).append(position)
    packs = []
    for dtype, members in positions.items():
        offsets = [0, *accumulate(gradients[position].size for position in members)]
        packs.append(Packed(tuple(members), tuple(offsets), aligned(offsets[-1], dtype)))
    return packs
