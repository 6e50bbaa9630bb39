"""`Rule`: what one step does to an array, whatever carries it out, and wherever.

A family is a subclass with a function on flat contiguous arrays (parameter, gradient, slots, scratch), that works in
place, allocates nothing, and so can be applied to whole variables or to any slices of them.
"""

from __future__ import annotations

import abc
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy

from mpidist.device.kernels import Formula
from mpidist.optimizers import slices
from mpidist.variables import DistributedVariable

#: A number, or a function of the steps made.
LearningRate = float | Callable[[int], float]


@dataclass(frozen=True)
class Step:
    """One step for one variable: all but the gradient.

    Attributes
    ----------
    coefficients : tuple of float
        What `Optimizer.coefficients` returned for this step.
    factor : float
        Multiplies the gradient: loss scale, micro-batches and norm together.
    decay : float
        Share of the parameter that is taken away before the rule.
    variable : Variable, optional
        Whose step it is, for rules that need more of it than a slice.
    """

    coefficients: tuple[float, ...]
    factor: float = 1.0
    decay: float = 0.0
    variable: Any = None


class Rule(abc.ABC):
    """The step of a family of optimizers, with its settings and the steps made; it keeps nothing of the variables.

    Parameters
    ----------
    learning_rate : float or callable
        A callable gets the number of steps made so far and returns a float.
    weight_decay : float, optional
        ``p -= learning_rate * weight_decay * p`` before every update.
    clipvalue : float, optional
        Elements of gradients are cut off at this value and at its negative.

    Attributes
    ----------
    slot_names : tuple of str
        The arrays kept for every variable.
    """

    slot_names: tuple[str, ...] = ()
    #: Arrays of the slice's size that `update_slice` may write intermediate results to; at least 1.
    scratch_count = 1
    #: Steps made.
    iterations: int
    #: Whether a gradient of 0 leaves parameter and slots as they are: rows without a gradient need not be touched.
    zero_gradient_changes_nothing = False

    def __init__(
        self, learning_rate: LearningRate, weight_decay: float | None = None, clipvalue: float | None = None
    ) -> None:
        if weight_decay is not None and not weight_decay >= 0:
            raise ValueError(f"weight_decay must be 0 or more, or None; got {weight_decay}")
        self._learning_rate = self._first_learning_rate = learning_rate
        self._iterations = 0
        self.weight_decay = weight_decay
        self.clipvalue = clipvalue
        self._without_decay: list[DistributedVariable | re.Pattern[str]] = []
        self._scratch = slices.SliceScratch()

    # -- how fast, and how far ----------------------------------------------------------------------------------------

    @property
    def learning_rate(self) -> float:
        """The learning rate of the next step."""
        rate = self._learning_rate
        return float(rate(self.iterations) if callable(rate) else rate)

    @learning_rate.setter
    def learning_rate(self, value: LearningRate) -> None:
        self._set_learning_rate(value)

    def _set_learning_rate(self, value: LearningRate) -> None:
        if not callable(value):
            self.require_no_schedule("a number set as learning_rate")
        self._learning_rate = value

    def _rate_to_save(self) -> dict[str, Any]:
        """Return what a state has of the learning rate: nothing of a schedule."""
        rate = self._learning_rate
        return {} if callable(rate) else {"learning_rate": float(rate)}

    def _restore_rate(self, state: Mapping[str, Any]) -> None:
        """Take over the learning rate of a state, unless there is a schedule."""
        if not callable(self._learning_rate):
            self._learning_rate = float(state.get("learning_rate", self._learning_rate))

    @property
    def has_schedule(self) -> bool:
        """Whether the learning rate is a function of the steps."""
        return callable(self._learning_rate)

    def require_no_schedule(self, asked: str) -> None:
        """Raise TypeError where `asked`, which sets the learning rate to a number, would end a schedule.  Local."""
        if self.has_schedule:
            raise TypeError(
                f"{asked} would replace the schedule that is the learning rate of this {type(self).__name__}. Give "
                "the optimizer a number as learning_rate, or set another schedule"
            )

    # -- what a family says -------------------------------------------------------------------------------------------

    def coefficients(self, learning_rate: float, iterations: int) -> tuple[float, ...]:
        """Return the numbers of one step that `update_slice` needs: the learning rate alone by default.  Local.

        Parameters
        ----------
        learning_rate : float
        iterations : int
            Steps made before this one.
        """
        return (learning_rate,)

    @abc.abstractmethod
    def update_slice(
        self, parameter: Any, gradient: Any, slots: list[Any], scratch: list[Any], coefficients: tuple[float, ...]
    ) -> None:
        """Update `parameter` and `slots` in place.  Local; allocates nothing.

        Parameters
        ----------
        parameter, gradient : array, shape (n,), contiguous
            Of the same floating dtype of at least 32 bits; `gradient` is not changed.
        slots : list of array, shape (n,), contiguous
            In the order of `slot_names`.
        scratch : list of array, shape (n,), contiguous
            `scratch_count` arrays with anything in them.
        coefficients : tuple of float
            What `coefficients` returned for this step.
        """

    def formula(self, coefficients: tuple[float, ...]) -> tuple[str, dict[str, float]]:
        """Return what `update_slice` does to an element, in C++, and the numbers in it by name.  Local.

        See `mpidist.device.kernels.Formula`.  It is for GPUs, and for classes whose `update_slice` is not overridden;
        a family without it is updated there by `update_slice`.
        """
        raise NotImplementedError

    def renew_slice(
        self,
        new: Any,
        parameter: Any,
        gradient: Any,
        new_slots: list[Any],
        slots: list[Any],
        scratch: list[Any],
        coefficients: tuple[float, ...],
    ) -> None:
        """Write to `new` and `new_slots` what `update_slice` would make of `parameter` and `slots`, which stay.

        Local; everything else as for `update_slice`, and the same bits.  `new` is other memory; `new_slots` may be
        `slots`, which are then updated in place.  A family may do it with fewer passes.
        """
        new[...] = parameter
        if new_slots is not slots:
            for new_slot, slot in zip(new_slots, slots, strict=True):
                new_slot[...] = slot
        self.update_slice(new, gradient, new_slots, scratch, coefficients)

    def initial_slots(self) -> Mapping[str, float]:
        """Return what slots are filled with at first, by name; 0 for those that are not named.  Local."""
        return {}

    @property
    def takes_slices(self) -> bool:
        """Whether it needs no more of a gradient than the slice that is updated."""
        return True

    def takes_slices_of(self, variable: Any) -> bool:
        """Return whether it needs no more of the gradient for this variable than the slice that is updated.  Local."""
        return self.takes_slices

    @property
    def _joins(self) -> bool:
        """Whether neighbours of the same decay are updated alike, so that one call does for all of them."""
        return self.takes_slices and type(self).step_of is Rule.step_of and type(self).update is Rule.update

    def exclude_from_weight_decay(
        self, var_list: Iterable[DistributedVariable] = (), var_names: Iterable[str] = ()
    ) -> None:
        """Leave variables out of the weight decay.  Local.

        Parameters
        ----------
        var_list : iterable of Variable
        var_names : iterable of str
            Regular expressions that are searched for in the variables' names; of shards, in that of the whole too.

        Raises
        ------
        TypeError
            The list has something else than variables, or the names are one text.
        """
        variables = list(var_list)
        for each in variables:
            if not isinstance(each, DistributedVariable):
                raise TypeError(
                    f"var_list takes a list of variables of mpidist, one of them is a {type(each).__name__}; names go "
                    "into var_names"
                )
        self._without_decay += [*variables, *patterns(var_names, "var_names")]

    def step_of(self, variable: Any, learning_rate: float, coefficients: tuple[float, ...], factor: float) -> Step:
        """Return what this step does to one variable.  Local."""
        return Step(coefficients, factor, learning_rate * self.decay_of(variable))

    def decay_of(self, variable: Any) -> float:
        """Return the weight decay of one variable, 0 where it is excluded.  Local."""
        if not self.weight_decay:
            return 0.0
        excluded = any(
            each is variable if isinstance(each, DistributedVariable) else is_found(each, variable)
            for each in self._without_decay
        )
        return 0.0 if excluded else self.weight_decay

    def update(self, parameter: Any, gradient: Any, slots: list[Any], step: Step) -> None:
        """Apply the rule to flat contiguous arrays of any length and floating dtype, in place.  Local.

        Parameters
        ----------
        parameter, gradient : array, shape (n,), contiguous
        slots : list of array, shape (n,), contiguous
            Float32 for parameters of 16 bits: those are updated in float32 and rounded once.
        step : Step
        """
        for p, g, s, scratch, store in self._slices(parameter, gradient, slots, step.factor):
            self._update_block(p, g, s, scratch, step)
            if store is not None:
                store[...] = p

    @property
    def has_formula(self) -> bool:
        """Whether there is a `formula`, of the same class as `update_slice`, and nothing else in an update."""
        family = type(self)
        own = next(vars(each) for each in family.__mro__ if not {"formula", "update_slice"}.isdisjoint(vars(each)))
        return "formula" in own and family.update is Rule.update

    def in_formula(self, steps: Sequence[Step]) -> tuple[Formula, list[tuple[float, ...]]]:
        """Return the formula, and the numbers of each step as `update.cu` has them; once those of all alike.  Local."""
        limit = math.inf if self.clipvalue is None else self.clipvalue
        numbers = []
        for step in steps if any(step is not steps[0] for step in steps) else steps[:1]:
            statement, own = self.formula(step.coefficients)
            numbers.append((step.factor, step.decay, limit, *own.values()))
        return Formula(statement, tuple(self.slot_names), tuple(own)), numbers

    def _update_block(self, parameter: Any, gradient: Any, slots: list[Any], scratch: list[Any], step: Step) -> None:
        """Apply the rule to one of the `_blocks`, with gradients that `_takes_unchanged`, in place.  Local."""
        if step.decay:
            numpy.multiply(parameter, step.decay, out=scratch[0])
            parameter -= scratch[0]
        self.update_slice(parameter, gradient, slots, scratch, step.coefficients)

    def _takes_unchanged(self, step: Step) -> bool:
        """Return whether gradients are neither multiplied nor clipped before the rule, `update_slice`.  Local."""
        return step.factor == 1 and self.clipvalue is None and type(self).update is Rule.update

    def _blocks(self, parameter: Any, slots: list[Any]) -> Iterator[tuple[slice, Any, list[Any], list[Any]]]:
        """Yield (where, parameter, slots, scratch) of every slice of a flat array of at least 32 bits.  Local.

        For `_update_block`; they stay good as long as the arrays.
        """
        scratch = self._scratch.arrays(parameter, parameter.dtype, self.scratch_count)
        for where in slices.bounds(parameter):
            p, *s = slices.pick([parameter, *slots], where)
            yield where, p, s, slices.pick(scratch, slice(0, len(p)))

    def _slices(
        self, parameter: Any, gradient: Any, slots: list[Any], factor: float
    ) -> Iterator[tuple[Any, Any, list[Any], list[Any], Any]]:
        """Yield (parameter, gradient, slots, scratch, where to round the parameter to, if anywhere) of every slice.

        Parameter and gradient come in the dtype of the computation, the gradient multiplied and clipped by value.
        """
        dtype = slices.compute_dtype(parameter.dtype)
        is_narrow, limit = parameter.dtype != dtype, self.clipvalue
        is_changed = gradient.dtype != dtype or factor != 1 or limit is not None
        scratch = self._scratch.arrays(parameter, dtype, self.scratch_count + is_changed + is_narrow)
        for where in slices.bounds(parameter):
            p, g, *s = slices.pick([parameter, gradient, *slots], where)
            short = slices.pick(scratch, slice(0, len(p)))
            store = None
            if is_changed:
                g = _changed(g, short.pop(), factor, limit)
            if is_narrow:
                store, wide = p, short.pop()
                wide[...] = p
                p = wide
            yield p, g, s, short, store


def patterns(names: Iterable[str], parameter: str) -> list[re.Pattern[str]]:
    """Return regular expressions; TypeError for one text, of which each letter would be an expression.  Local."""
    if isinstance(names, str):
        raise TypeError(f"{parameter} takes a list of regular expressions, got the text {names!r}; give [{names!r}]")
    return [re.compile(name) for name in names]


def is_found(pattern: re.Pattern[str], variable: Any) -> bool:
    """Return whether a pattern is found in the name of a variable, or of that of which it is a shard.  Local."""
    names = {variable.name, getattr(variable, "whole_name", variable.name)}
    return any(pattern.search(name) for name in names)


def by_name(excluded: DistributedVariable | re.Pattern[str]) -> re.Pattern[str]:
    """Return a pattern for what is left out of the weight decay: a variable with all its shards, or what it was."""
    return excluded if isinstance(excluded, re.Pattern) else re.compile(rf"^{re.escape(excluded.name)}$")


def checked_momentum(momentum: float) -> float:
    """Return a momentum; ValueError unless it is from 0 to 1.  Local."""
    if not 0 <= momentum <= 1:
        raise ValueError(f"momentum must be from 0 to 1, got {momentum}")
    return momentum


def checked_rate(name: str, rate: float) -> float:
    """Return the rate of a running mean; ValueError unless it is 0 or more, and less than 1.  Local."""
    if not 0 <= rate < 1:
        raise ValueError(f"{name} must be 0 or more and less than 1, got {rate}")
    return rate


def _changed(gradient: Any, buffer: Any, factor: float, limit: float | None) -> Any:
    """Return the gradient in the buffer, multiplied by a factor, then cut off at a limit."""
    buffer[...] = gradient
    if factor != 1:
        buffer *= factor
    if limit is not None:
        numpy.clip(buffer, -limit, limit, out=buffer)
    return buffer
