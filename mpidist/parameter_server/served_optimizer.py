"""A user's optimizer at a server: the copy that travels, and how it updates variables that lie side by side.

The slots of all variables of a layout lie like the variables themselves.  So an update whose rule is the same for
neighbours is one call for all of them, from one copy of the variables into another, slice by slice.
"""

from __future__ import annotations

import importlib
import math
import pickle
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy

from mpidist.errors import MissingDependencyError, TornVariableError
from mpidist.optimizers.base import Optimizer
from mpidist.optimizers.rules.rule import Step
from mpidist.optimizers.saved_slots import SavedSlots
from mpidist.optimizers.slices import SLICE_ELEMENTS, compute_dtype
from mpidist.parameter_server.layout import Key, Layout, Plan, VariableSpec
from mpidist.parameter_server.published import Copies
from mpidist.variables import IndexedSlices

#: Of how many payloads a run keeps views, and in memory of how many bytes at most: those from other nodes are new
#: arrays, and memory that has become too small is not to be held by lists that are not pushed again.
_KEPT_PAYLOADS, _KEPT_BYTES = 64, 1 << 18

#: Where this package's rules are.
_OURS = Optimizer.__module__.rpartition(".")[0] + "."

_NOTHING: tuple[Any, list[Any]] = (None, [])


class StoredVariable:
    """A variable, or a shard of one, on its server: what optimizers need of it.

    Attributes
    ----------
    spec : VariableSpec
    storage : array
        The value; for a variable among others, in whichever copy it is read or written.
    """

    #: Its slots are laid out by `ServedOptimizer`.
    stretch = None

    def __init__(self, spec: VariableSpec, storage: Any) -> None:
        self.spec = spec
        self.storage = storage

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def shape(self) -> tuple[int, ...]:
        return self.spec.shape

    @property
    def dtype(self) -> Any:
        return self.spec.dtype

    @property
    def saved_shape(self) -> tuple[int, ...]:
        return self.spec.shape

    def own_part(self, whole: Any) -> Any:
        return whole

    def joined(self, part: Any) -> Any:
        return part

    def empty_slot(self, dtype: Any) -> Any:
        return numpy.empty(self.spec.size, dtype)


def packed(optimizer: Optimizer) -> bytes:
    """Return an optimizer as bytes: its rule and settings, without slots and steps, which its server keeps.

    What needs whole gradients, or several micro-batches, is done by the clients before they push: clipping by norm,
    loss scale, accumulation, and leaving out what is not finite.

    Raises
    ------
    MissingDependencyError
        A function of it, such as a schedule, cannot be found by its name, and cloudpickle is not installed.
    """
    return pickled(optimizer.rule_only())


def pickled(value: Any) -> bytes:
    """Return an optimizer or a schedule as bytes; errors as for `packed`."""
    try:
        cloudpickle = importlib.import_module("cloudpickle")
    except ImportError:
        return _pickled_by_name(value)
    return cloudpickle.dumps(value)


def _pickled_by_name(value: Any) -> bytes:
    parts = (value, getattr(value, "_learning_rate", None))
    of_script: list[Any] = [each for each in parts if _is_of_script(each)]
    if not of_script:
        try:
            return pickle.dumps(value)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            of_script = [error]
    raise MissingDependencyError(
        f"{value!r} cannot be sent to the servers by names alone: {of_script[0]!r}. Put its functions and classes into "
        "a module that the script imports, or: pip install cloudpickle"
    )


def _is_of_script(value: Any) -> bool:
    """Whether a class or function belongs to the script, which servers leave before they come to its definition."""
    owner = value if hasattr(value, "__qualname__") else type(value)
    return getattr(owner, "__module__", "") == "__main__"


@dataclass
class Piece:
    """A part of a run that fits into the cache with all that its update needs.

    Attributes
    ----------
    where : slice
        Elements of the run.
    copies, slots, scratch : list of array
        As those of a run, and of `Optimizer.update_slice`.
    """

    where: slice
    copies: list[Any]
    slots: list[Any]
    scratch: list[Any]


@dataclass
class Run:
    """Neighbours in a layout, and in a push, that one call updates.

    Attributes
    ----------
    section : int
        Of the layout.
    start, stop : int
        Elements of that section.
    copies : list of array
        These elements in every copy of the variables.
    wire : slice
        Bytes of the payload.
    wire_dtype : numpy.dtype
    decay : float
        Weight decay of all of them.
    slots : list of array
    variable : StoredVariable or None
        Whose run it is, where the rule needs to know.
    is_plain : bool
        Whether nothing but the rule is applied, to gradients that are as they must be.
    pieces : list of Piece
        All of it, where it is plain.
    """

    section: int
    start: int
    stop: int
    wire: slice
    wire_dtype: numpy.dtype
    decay: float
    slots: list[Any]
    variable: StoredVariable | None
    copies: list[Any] = field(default_factory=list)
    is_plain: bool = False
    pieces: list[Piece] = field(default_factory=list)
    _gradients: dict[int, tuple[Any, list[Any]]] = field(default_factory=dict)

    def gradients_in(self, payload: Any) -> list[Any]:
        """Return the gradient of each piece, as views of a payload; kept, as payloads come in the same few arrays."""
        payload_again, found = self._gradients.get(id(payload), _NOTHING)
        if payload_again is not payload:
            whole = payload[self.wire].view(self.wire_dtype)
            found = [whole[piece.where] for piece in self.pieces]
            memory = payload if payload.base is None else payload.base
            if memory.size <= _KEPT_BYTES:
                if len(self._gradients) >= _KEPT_PAYLOADS:
                    self._gradients.clear()
                self._gradients[id(payload)] = payload, found
        return found


class ServedOptimizer:
    """An optimizer of a server.

    Parameters
    ----------
    content : bytes
        What `packed` returned.
    """

    def __init__(self, content: bytes) -> None:
        self.optimizer: Optimizer = pickle.loads(content)
        kind = type(self.optimizer)
        #: Whether neighbours of the same decay are updated alike, so that one call does for all of them.
        self.joins = kind.step_of is Optimizer.step_of and kind.update is Optimizer.update
        #: Whether a step changes variables and the number of steps, and nothing else: rules of others may keep things.
        self.is_stateless = self.joins and not self.optimizer.slot_names and kind.__module__.startswith(_OURS)
        # The slots of a section, made when the first variable of it is met.
        self._slots_of_section: dict[int, list[Any]] = {}
        self._met: dict[Key, StoredVariable] = {}
        self._placed: set[Key] = set()
        self._scratch: dict[numpy.dtype, list[Any]] = {}
        self._torn: str | None = None

    # -- slots --------------------------------------------------------------------------------------------------------

    def laid_out(self) -> None:
        """Take note that there is a new layout: slots move when their variables are met next."""
        self._slots_of_section = {}
        self._placed = set()

    def slots_in(self, layout: Layout, variable: StoredVariable) -> tuple[list[Any], int]:
        """Return the slots of the section in which a variable lies, its own among them, and its first element."""
        index = layout.index[variable.spec.key]
        section, first = layout.section_of[index], layout.first[index]
        whole = self._slots_of_section.get(section)
        if whole is None:
            place = layout.sections[section]
            dtype = compute_dtype(place.dtype)
            whole = [numpy.zeros(place.size, dtype) for _ in self.optimizer.slot_names]
            self._slots_of_section[section] = whole
        if variable.spec.key not in self._placed:
            views = [slot[first : first + variable.spec.size] for slot in whole]
            for view, before in zip(views, self.slots_of(variable), strict=True):
                view[...] = before
            self.optimizer.keep_slots(variable, views)
            self._placed.add(variable.spec.key)
        return whole, first

    def slots_of(self, variable: StoredVariable) -> list[Any]:
        """Return the slots of a variable, flat."""
        self._met.setdefault(variable.spec.key, variable)
        return self.optimizer.slot_arrays(variable)

    def tear(self, cause: str) -> None:
        """Take note that an update was broken off: slots have no value until they are restored."""
        if self.optimizer.slot_names:
            self._torn = cause

    @property
    def is_torn(self) -> bool:
        """Whether slots are torn."""
        return self._torn is not None

    def require_whole(self) -> None:
        """Raise TornVariableError if slots have been torn."""
        if self._torn is not None:
            raise TornVariableError(
                f"the slots of {type(self.optimizer).__name__} are torn: {self._torn}. They are neither the old nor "
                "the new ones. Restore a checkpoint that has the optimizer"
            )

    # -- updates ------------------------------------------------------------------------------------------------------

    def runs(self, buffers: Copies, plan: Plan, variables: Iterable[StoredVariable]) -> list[Run]:
        """Return what to update for a push, of those variables that lie side by side."""
        layout = buffers.layout
        found: list[Run] = []
        for variable, (number, at) in zip(variables, plan.places, strict=True):
            if variable.spec.key not in layout.index:
                continue
            wire = plan.sections[number]
            begin, end = (wire.start + (at + n) * wire.dtype.itemsize for n in (0, variable.spec.size))
            section = layout.section_of[layout.index[variable.spec.key]]
            slots, first = self.slots_in(layout, variable)
            last = first + variable.spec.size
            decay = self.optimizer.decay_of(variable)
            before = found[-1] if found and self.joins else None
            if (
                before is not None
                and (before.section, before.stop, before.wire.stop, before.decay) == (section, first, begin, decay)
                and before.wire_dtype == wire.dtype
            ):
                before.stop, before.wire = last, slice(before.wire.start, end)
            else:
                own = None if self.joins else variable
                found.append(Run(section, first, last, slice(begin, end), wire.dtype, decay, slots, own))
        for run in found:
            run.slots = [slot[run.start : run.stop] for slot in run.slots]
            run.copies = [sections[run.section][run.start : run.stop] for sections in buffers.sections]
            dtype = layout.sections[run.section].dtype
            run.is_plain = run.variable is None and not run.decay and self.optimizer.clipping.clipvalue is None
            run.is_plain = run.is_plain and run.wire_dtype == dtype == compute_dtype(dtype)
            run.pieces = self._pieces(run, dtype) if run.is_plain else []
        return found

    def _pieces(self, run: Run, dtype: numpy.dtype) -> list[Piece]:
        scratch, size = self._scratch_of(dtype), run.stop - run.start
        found = []
        for start in range(0, size, SLICE_ELEMENTS):
            where = slice(start, min(start + SLICE_ELEMENTS, size))
            copies, slots = ([each[where] for each in arrays] for arrays in (run.copies, run.slots))
            found.append(Piece(where, copies, slots, [each[: where.stop - start] for each in scratch]))
        return found

    def rate(self, learning_rate: float) -> float:
        """Return the learning rate of a push: its own, or the optimizer's where that is NaN."""
        return self.optimizer.learning_rate if math.isnan(learning_rate) else learning_rate

    def update(self, runs: Sequence[Run], old: int, new: int, payload: Any, rate: float, scale: float) -> None:
        """Apply gradients: read variables in one copy, write them to another, which may be the same.

        Parameters
        ----------
        runs : sequence of Run
        old, new : int
            The copies.
        payload : array of uint8
        rate : float
            Learning rate.
        scale : float
            What gradients are multiplied by.
        """
        optimizer = self.optimizer
        coefficients = optimizer.coefficients(rate, optimizer.iterations)
        for run in runs:
            if run.is_plain and scale == 1:
                self._apply_rule(run, old, new, payload, coefficients)
                continue
            gradient = payload[run.wire].view(run.wire_dtype)
            if run.variable is None:
                step = Step(coefficients, scale, rate * run.decay)
                self._apply_step(run, run.copies[old], run.copies[new], gradient, step)
            else:
                if old != new:
                    run.copies[new][...] = run.copies[old]
                step = optimizer.step_of(run.variable, rate, coefficients, scale)
                optimizer.update(run.copies[new], gradient, run.slots, step)

    def _apply_rule(self, run: Run, old: int, new: int, payload: Any, coefficients: tuple[float, ...]) -> None:
        optimizer = self.optimizer
        for piece, gradient in zip(run.pieces, run.gradients_in(payload), strict=True):
            parameter = piece.copies[new]
            if old == new:
                optimizer.update_slice(parameter, gradient, piece.slots, piece.scratch, coefficients)
            else:
                optimizer.renew_slice(parameter, piece.copies[old], gradient, piece.slots, piece.scratch, coefficients)

    def _apply_step(self, run: Run, old: Any, new: Any, gradient: Any, step: Step) -> None:
        """Copy and update slice by slice, so that the copy is still in cache when it is updated."""
        for start in range(0, new.size, SLICE_ELEMENTS):
            where = slice(start, start + SLICE_ELEMENTS)
            if old is not new:
                new[where] = old[where]
            self.optimizer.update(new[where], gradient[where], [slot[where] for slot in run.slots], step)

    def _scratch_of(self, dtype: numpy.dtype) -> list[Any]:
        found = self._scratch.get(dtype)
        if found is None:
            count = self.optimizer.scratch_count
            found = self._scratch[dtype] = [numpy.empty(SLICE_ELEMENTS, dtype) for _ in range(count)]
        return found

    def update_rows(self, variable: StoredVariable, indices: Any | None, rows: Any, rate: float, scale: float) -> None:
        """Apply the gradient of a variable that lies by itself, in place: of some rows, each once, or of all of it."""
        optimizer = self.optimizer
        coefficients = optimizer.coefficients(rate, optimizer.iterations)
        step = optimizer.step_of(variable, rate, coefficients, scale)
        slots = self.slots_of(variable)
        rows = rows.astype(variable.dtype, copy=False)
        gradient = rows.reshape(variable.shape) if indices is None else IndexedSlices(rows, indices, variable.shape)
        optimizer.update_part(gradient, variable, slots, step)

    # -- state --------------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return steps and settings, and slots as ``"variable/shard/slot"``; TornVariableError if slots are torn."""
        self.require_whole()
        state = self.optimizer.state()
        found: dict[str, Any] = {name: value for name, value in state.items() if isinstance(value, (int, float))}
        of_optimizer: Callable[[Any], dict[str, Any]] = self.optimizer.slots  # to it, a stored variable is one
        for key, variable in self._met.items():
            for slot, array in of_optimizer(variable).items():
                found[f"{key[0]}/{key[1]}/{slot}"] = array
        return found

    def restore(self, state: dict[str, Any], variables: dict[Key, StoredVariable]) -> None:
        """Take over what `state` gave, for variables of this server."""
        slots: dict[Key, dict[str, Any]] = {}
        for name, value in state.items():
            if name.count("/") == 2:
                number, shard, slot = name.split("/")
                slots.setdefault((int(number), int(shard)), {})[slot] = value
        for key in slots:
            self.slots_of(variables[key])
        saved = [SavedSlots(variables[key].name, arrays, variables[key]) for key, arrays in slots.items()]
        self.optimizer.take_over(state, saved)
        self._torn = None
