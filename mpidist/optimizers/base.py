"""`Optimizer`: from gradients of every replica to updated variables.

A family is a subclass with a *rule*: a function on flat contiguous arrays (parameter, gradient, slots, scratch), that
works in place, allocates nothing, and so can be applied to whole variables or to any slices of them.
"""

from __future__ import annotations

import abc
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from mpidist import arrays, context
from mpidist.optimizers import slices
from mpidist.options import ReduceOp
from mpidist.variables import DistributedVariable

LearningRate = float | Callable[[int], float]


class Optimizer(abc.ABC):
    """Base of the optimizers.

    Parameters
    ----------
    learning_rate : float or callable
        A callable gets the number of steps made so far and returns a float.  It is never scaled by the number of
        replicas: gradients are summed, and it is the loss that divides by the global batch.

    Attributes
    ----------
    iterations : int
        Steps made: one per `apply_gradients`, on however many replicas.
    slot_names : tuple of str
        The arrays kept for every variable.
    """

    slot_names: tuple[str, ...] = ()
    #: Arrays of the slice's size that `update_slice` may write intermediate results to.
    scratch_count = 1

    def __init__(self, learning_rate: LearningRate) -> None:
        self._learning_rate = learning_rate
        self.iterations = 0
        # (Variable, its slots), in the order of first use.  The reference keeps the id, by which a variable is found,
        # from being reused.
        self._slots: list[tuple[Any, list[Any]]] = []
        self._number_of_id: dict[int, int] = {}
        self._restored: dict[str, Any] = {}
        self._scratch = slices.Scratch()

    @property
    def learning_rate(self) -> float:
        """The learning rate of the next step."""
        rate = self._learning_rate
        return float(rate(self.iterations) if callable(rate) else rate)

    @learning_rate.setter
    def learning_rate(self, value: LearningRate) -> None:
        self._learning_rate = value

    @property
    def elementwise(self) -> bool:
        """Whether any slices of the summed gradients may be applied by themselves, by `update`, in any order."""
        return True

    @abc.abstractmethod
    def coefficients(self, learning_rate: float, iterations: int) -> tuple[float, ...]:
        """Return the numbers of one step that `update_slice` needs.  Local.

        Parameters
        ----------
        learning_rate : float
        iterations : int
            Steps made before this one.
        """

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

    def apply_gradients(self, gradients_and_variables: Iterable[tuple[Any, Any]]) -> None:
        """Sum the gradients over the replicas, then update the variables in place.

        Collective inside `strategy.run`: every replica calls it with the same variables in the same order.
        Local under the default strategy and under a strategy of one replica.

        Parameters
        ----------
        gradients_and_variables : iterable of (array or None, Variable)
            A gradient has its variable's shape.  A variable whose gradient is None is left as it is.

        Raises
        ------
        TypeError
            A pair is not (gradient, variable), or a variable is not of a floating dtype.
        ValueError
            If there is no gradient at all, or a gradient's shape is not its variable's.
        RuntimeError
            With more than one replica: outside `strategy.run`, or a variable was not created in the strategy's scope.
        """
        pairs = list(gradients_and_variables)
        _require_pairs(pairs)
        pairs = _with_gradients(pairs)
        _require_replica_context([variable for _, variable in pairs])
        gradients = [_as_gradient(gradient, variable) for gradient, variable in pairs]
        if not context.in_cross_replica_context():
            variables = [variable for _, variable in pairs]
            gradients = context.get_strategy().extended.reduce_arrays(ReduceOp.SUM, gradients, destinations=variables)
        coefficients = self.coefficients(self.learning_rate, self.iterations)
        for gradient, (_, variable) in zip(gradients, pairs, strict=True):
            slots = self._slots_of(variable)
            self.update(variable.storage.reshape(-1), gradient.reshape(-1), slots, coefficients)
        self.iterations += 1

    def update(self, parameter: Any, gradient: Any, slots: list[Any], coefficients: tuple[float, ...]) -> None:
        """Apply the rule to flat contiguous arrays of any length and floating dtype, in place.  Local.

        Parameters
        ----------
        parameter, gradient : array, shape (n,), contiguous
        slots : list of array, shape (n,), contiguous
            Float32 for parameters of 16 bits: those are updated in float32 and rounded once.
        coefficients : tuple of float
        """
        dtype = slices.compute_dtype(parameter.dtype)
        narrow = parameter.dtype != dtype
        scratch = self._scratch.arrays(parameter, dtype, self.scratch_count + 2 * narrow)
        for where in slices.bounds(parameter):
            p, g, *s = slices.pick([parameter, gradient, *slots], where)
            short = slices.pick(scratch, slice(0, len(p)))
            if narrow:
                wide_p, wide_g = short[-2:]
                wide_p[...], wide_g[...] = p, g
                self.update_slice(wide_p, wide_g, s, short[:-2], coefficients)
                p[...] = wide_p
            else:
                self.update_slice(p, g, s, short, coefficients)

    def slots(self, variable: Any) -> dict[str, Any]:
        """Return the slots of a variable by name, in its shape, as live views.  Local."""
        shape = variable.storage.shape
        found = self._slots_of(variable)
        return {name: slot.reshape(shape) for name, slot in zip(self.slot_names, found, strict=True)}

    def state(self) -> dict[str, Any]:
        """Return ``iterations`` and all slots, as ``"number/slot"`` to live views, for a checkpoint.  Local.

        Variables are numbered in the order in which they were first updated.
        """
        found: dict[str, Any] = {"iterations": self.iterations}
        for number, (variable, _) in enumerate(self._slots):
            found.update({f"{number}/{name}": slot for name, slot in self.slots(variable).items()})
        return {**self._restored, **found}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over what `state` gave, also before this optimizer has met its variables.  Local.

        Raises
        ------
        ValueError
            A slot's shape is not its variable's; for variables not met yet, at their first update.
        """
        self._restored = {key: value for key, value in state.items() if key != "iterations"}
        self.iterations = int(state["iterations"])
        for number, (variable, slots) in enumerate(self._slots):
            self._restore_slots(number, variable, slots)

    def _slots_of(self, variable: Any) -> list[Any]:
        number = self._number_of_id.get(id(variable))
        return self._register(variable) if number is None else self._slots[number][1]

    def _register(self, variable: Any) -> list[Any]:
        storage, number = variable.storage, len(self._slots)
        dtype = slices.compute_dtype(storage.dtype)
        slots = [arrays.empty(storage.size, dtype, storage) for _ in self.slot_names]
        self._restore_slots(number, variable, slots)
        self._slots.append((variable, slots))
        self._number_of_id[id(variable)] = number
        return slots

    def _restore_slots(self, number: int, variable: Any, slots: list[Any]) -> None:
        """Set slots to what was restored for them, or to 0."""
        for name, slot in zip(self.slot_names, slots, strict=True):
            value = self._restored.pop(f"{number}/{name}", None)
            if value is None:
                slot[...] = 0
                continue
            if value.shape != variable.shape:
                raise ValueError(
                    f"slot {name!r} for variable {variable.name!r} was saved with shape {value.shape}, expected "
                    f"{variable.shape}: the variables were first updated in another order, or the model has changed"
                )
            slot[...] = arrays.namespace(slot).asarray(value).reshape(-1)


def _require_pairs(pairs: list[Any]) -> None:
    """Raise TypeError unless all are (gradient, variable), with variables that gradients can update."""
    for number, pair in enumerate(pairs):
        is_pair = isinstance(pair, (tuple, list)) and len(pair) == 2
        if not (is_pair and isinstance(pair[1], DistributedVariable)):
            got = f"({', '.join(type(each).__name__ for each in pair)})" if is_pair else type(pair).__name__
            raise TypeError(
                f"`apply_gradients` takes pairs (gradient, variable), in this order; pair {number} is {got}. Variables "
                "are made by `mpidist.Variable`"
            )
        gradient, variable = pair
        if gradient is not None and not _is_floating(variable.dtype):
            raise TypeError(
                f"variable {variable.name!r} is {variable.dtype} and cannot be updated by gradients; give it a "
                "floating dtype (Variable(value, dtype='float32')), or leave it out and use `assign`"
            )


def _is_floating(dtype: Any) -> bool:
    # ml_dtypes' floats, bfloat16 for one, are of kind V
    return dtype.kind == "f" or (dtype.kind == "V" and dtype.names is None)


def _with_gradients(pairs: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """Return the pairs that have a gradient; warns about the others."""
    present = [(gradient, variable) for gradient, variable in pairs if gradient is not None]
    names = [variable.name for gradient, variable in pairs if gradient is None]
    if not present:
        raise ValueError(f"no gradients provided for any variable: all are None, for the variables {names}")
    if names:
        warnings.warn(f"gradients are None for the variables {names}; they are not updated", stacklevel=3)
    return present


def _require_replica_context(variables: list[Any]) -> None:
    """Raise RuntimeError where gradients of several replicas would have to be summed, outside `run`."""
    strategy = context.get_strategy()
    foreign = [variable for variable in variables if variable.strategy is not strategy]
    replicas = max(each.num_replicas_in_sync for each in (strategy, *(variable.strategy for variable in foreign)))
    if replicas == 1 or not (foreign or context.in_cross_replica_context()):
        return
    if context.in_cross_replica_context() or context.is_default(strategy):
        raise RuntimeError(
            f"`apply_gradients` sums over {replicas} replicas and was called outside of a replica. Call it in the "
            "function that you give to `strategy.run`."
        )
    raise RuntimeError(_foreign_text(foreign[0], strategy))


def _foreign_text(variable: Any, strategy: Any) -> str:
    """Return the message about a variable that is updated in a replica of a strategy which is not its own."""
    cure = "create it inside `with strategy.scope():` of the strategy whose `run` you call"
    if context.is_default(variable.strategy):
        return f"variable {variable.name!r} was not created in the scope of {strategy}; {cure}"
    return (
        f"Mixing different tf.distribute.Strategy objects: variable {variable.name!r} was created in the scope of "
        f"{variable.strategy}, and `apply_gradients` was called in `run` of {strategy}; make one strategy, or {cure}"
    )


def _as_gradient(gradient: Any, variable: Any) -> Any:
    """Return the gradient as an array of its variable's kind and dtype."""
    storage = variable.storage
    gradient = arrays.to_array(gradient)
    if gradient.shape != storage.shape:
        raise ValueError(
            f"the gradient for variable {variable.name!r} has shape {gradient.shape}, expected {storage.shape}"
        )
    return gradient if gradient.dtype == storage.dtype else gradient.astype(storage.dtype)
