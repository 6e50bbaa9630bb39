"""`Model`: the user's functions and the variables that they are called on, with checks of their results.

Results of functions are computed, and converted to arrays of ours, before anybody writes to a variable.  Everything
here is Local.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy

from mpidist import arrays, nest
from mpidist.device.memory import kept_empty
from mpidist.errors import listed
from mpidist.optimizers.gradients import where_variable_lies
from mpidist.optimizers.slices import compute_dtype
from mpidist.variables import DistributedVariable, IndexedSlices, snapshots

_ARRAYS = {numpy.ndarray}


class Evaluation(NamedTuple):
    """Loss, gradients and predictions of some rows."""

    loss: float
    gradients: list[Any]
    predictions: Any


class Model:
    """The functions of a `Trainer`, called on parameters and batches of one row or more, and their variables."""

    def __init__(
        self,
        value_and_grad_fn: Callable[..., Any],
        variables: Any,
        predict_fn: Callable[..., Any] | None = None,
        loss_fn: Callable[..., Any] | None = None,
        needs_predictions: bool = False,
    ) -> None:
        self._value_and_grad_fn = value_and_grad_fn
        self._predict_fn = predict_fn
        self._loss_fn = loss_fn
        self._needs_predictions = needs_predictions
        self.structure = variables
        self.variables = nest.flatten(variables)
        _require_variables(self.variables)
        self._is_trainable = [variable.trainable for variable in self.variables]
        self.trainable = [variable for variable in self.variables if variable.trainable]
        if not self.trainable:
            raise ValueError("there is no trainable variable to train; variables that are synchronized on read are not")
        self.strategy = self.variables[0].strategy
        # to be compared with those of gradients; of one variable there is nothing to mix up
        self._keys: list[Any] | None = _keys(variables) if len(self.variables) > 1 else None
        is_flat = type(variables) is dict and self._keys == [(key,) for key in sorted(variables)]
        self._flat_keys = variables.keys() if is_flat else None
        self._are_here = all(variable.is_here for variable in self.variables)
        self._values: list[Any] = []
        self._parameters: Any = None
        self._copies = [snapshots.SnapshotMemory() for _ in self.variables]

    def read_variables(self) -> None:
        """Look at the variables anew; to be called in a replica, before the first step."""
        self._values = [variable.value for variable in self.variables]
        self._parameters = nest.pack(self.structure, self._values)

    def begin_step(self) -> None:
        """Pull remote variables, in a replica, on ranks without rows too.  Local, or as `StrategyExtended.pull`."""
        if not self._are_here:
            self.strategy.extended.pull(own_first=False)
            self.read_variables()

    def _call(self, name: str, fn: Callable[..., Any], *args: Any) -> Any:
        """Call a function on the variables' values; ValueError if it writes to a copy of one."""
        # live views; a library that reads late gets what `value` is now, and one that wants to write gets copies of it
        if not snapshots.are_needed():
            return fn(self._parameters, *args)
        if self._are_here:
            self.read_variables()
        if not snapshots.are_written():
            return fn(self._parameters, *args)
        given = [copies.of(value) for copies, value in zip(self._copies, self._values, strict=True)]
        result = fn(nest.pack(self.structure, given), *args)
        for copy, value, variable in zip(given, self._values, self.variables, strict=True):
            if not _same_bits(copy, value):
                what = f"wrote to its copy of the value of variable {variable.name!r}, which changes no variable"
                raise self._error(ValueError, f"{what}. Write with the variable's `assign`; work on a clone", name)
        return result

    def train(self, batch: Any) -> Evaluation:
        """Return loss, gradients and predictions for a batch; ValueError or TypeError names the rank."""
        result = self._call("value_and_grad_fn", self._value_and_grad_fn, *arguments(batch))
        if not isinstance(result, (tuple, list)) or len(result) != 2:
            raise self._error(TypeError, f"must return (loss, gradients), got {_shape_of(result)}")
        value, gradients = result
        loss, predictions = value if isinstance(value, tuple) and len(value) == 2 else (value, None)
        number, found = self._number(loss), self._gradients(gradients)
        return Evaluation(number, found, self._predictions(batch, predictions))

    def test(self, batch: Any) -> Evaluation:
        """Return loss and predictions for a batch; ValueError or TypeError names the rank."""
        if self._loss_fn is None:
            return self.train(batch)
        value = self._call("loss_fn", self._loss_fn, *arguments(batch))
        loss, predictions = value if isinstance(value, tuple) and len(value) == 2 else (value, None)
        return Evaluation(self._number(loss, "loss_fn"), [], self._predictions(batch, predictions))

    def predict(self, x: Any) -> Any:
        """Return the predictions for inputs; ValueError if there is no function for that."""
        if self._predict_fn is None:
            raise ValueError(
                "predictions are needed, for `predict` or for metrics: give the trainer a predict_fn(parameters, x); "
                "or, for metrics, let value_and_grad_fn return ((loss, predictions), gradients)"
            )
        return _computed(self._call("predict_fn", self._predict_fn, x))

    def _predictions(self, batch: Any, found: Any) -> Any:
        if not self._needs_predictions:
            return None
        if type(batch) is not tuple or len(batch) < 2:
            raise ValueError(f"metrics need batches (x, y) with labels, got a {type(batch).__name__}")
        return self.predict(batch[0]) if found is None else _computed(found)

    def _number(self, loss: Any, name: str = "value_and_grad_fn") -> float:
        if type(loss) is float:
            return loss
        if numpy.shape(loss) != ():
            what = f"must return the mean loss over the rows, a number; got an array of shape {numpy.shape(loss)}"
            raise self._error(ValueError, what, name)
        try:
            return float(_computed(loss))
        except TypeError:
            raise self._error(TypeError, f"must return a loss that is a number, got {_shape_of(loss)}", name) from None

    def zeros(self) -> list[Any]:
        """Return zeros for each trainable variable, for a rank without rows; float32 for 16-bit floats."""
        zeros = []
        for variable in self.trainable:
            zero = kept_empty(variable.shape, compute_dtype(variable.dtype), variable.value)
            zero[...] = 0
            zeros.append(zero)
        return zeros

    def _gradients(self, gradients: Any) -> list[Any]:
        flat = nest.flatten(gradients)
        if len(flat) != len(self.variables):
            what = f"must return a gradient for each of the {len(self.variables)} variables, got {len(flat)} of them"
            raise self._error(ValueError, what)
        if self._keys is not None and not self._has_keys(gradients) and (keys := _keys(gradients)) != self._keys:
            what = f"must return gradients in the dicts of the variables, by {_listed(self._keys)}; got them by"
            raise self._error(ValueError, f"{what} {_listed(keys)}: they might go to one another's variables")
        pairs = zip(flat, self.variables, self._is_trainable, strict=True)
        return [self._gradient(gradient, variable) for gradient, variable, is_trainable in pairs if is_trainable]

    def _has_keys(self, gradients: Any) -> bool:
        """Return True at once for the commonest right ones: arrays in one list or dict, as the variables are."""
        if type(gradients) is dict:
            return gradients.keys() == self._flat_keys and set(map(type, gradients.values())) == _ARRAYS
        return type(gradients) is list and set(map(type, gradients)) == _ARRAYS and not any(self._keys or ())

    def _gradient(self, gradient: Any, variable: DistributedVariable) -> Any:
        if gradient is None:
            what = f"returned None as the gradient for variable {variable.name!r}; return zeros, or leave it out of "
            raise self._error(ValueError, what + "the trainer's variables (or make it with trainable=False)")
        if type(gradient) is not numpy.ndarray:
            gradient = where_variable_lies(_dense(gradient, variable), variable)
        if gradient.shape != variable.shape:
            what = f"returned a gradient of shape {gradient.shape} for variable {variable.name!r}"
            raise self._error(ValueError, f"{what}, expected {variable.shape}")
        if gradient.dtype == variable.dtype:
            return gradient
        if not arrays.keeps_meaning(gradient.dtype, variable.dtype):
            what = f"returned a gradient of dtype {gradient.dtype} for variable {variable.name!r}"
            raise self._error(TypeError, f"{what}, expected {variable.dtype}")
        return gradient.astype(variable.dtype)

    def _error(self, kind: type[Exception], what: str, name: str = "value_and_grad_fn") -> Exception:
        extended = self.strategy.extended
        return kind(f"rank {extended.replica_id} of {extended.num_replicas}: {name} {what}")


def arguments(batch: Any) -> tuple[Any, ...]:
    """Return a batch as arguments of a function: a tuple is several, anything else is one."""
    return batch if type(batch) is tuple else (batch,)


def _keys(structure: Any, above: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return for each leaf, in the order of `nest.flatten`, the keys of the dicts that it is in."""
    if isinstance(structure, dict):
        return [keys for key in sorted(structure) for keys in _keys(structure[key], (*above, key))]
    if isinstance(structure, (list, tuple)):
        return [keys for part in structure for keys in _keys(part, above)]
    return [above]


def _listed(keys: list[tuple[Any, ...]]) -> str:
    return listed([repr("/".join(map(str, each))) if each else "no key" for each in keys])


def _require_variables(variables: list[Any]) -> None:
    for number, variable in enumerate(variables):
        if not isinstance(variable, DistributedVariable):
            raise TypeError(
                f"variables must be made by `mpidist.Variable`; number {number} is a {type(variable).__name__}"
            )
    strategies = {id(variable.strategy): variable.strategy for variable in variables}
    if len(strategies) > 1:
        names = ", ".join(map(repr, strategies.values()))
        raise ValueError(
            f"the variables belong to several strategies: {names}; create all of them inside `with strategy.scope():`"
        )


def _dense(gradient: Any, variable: DistributedVariable) -> Any:
    if isinstance(gradient, IndexedSlices):
        return IndexedSlices(gradient.values, gradient.indices, variable.shape).to_dense()
    return arrays.to_array(gradient)


def _computed(result: Any) -> Any:
    """Return a structure with arrays of ours in place of other libraries' arrays, which are computed then."""
    if arrays.is_foreign(result):
        return arrays.to_array(result)
    if not isinstance(result, (dict, list, tuple)):
        return result
    leaves = nest.flatten(result)
    return nest.pack(result, [arrays.to_array(leaf) if arrays.is_foreign(leaf) else leaf for leaf in leaves])


def _same_bits(first: Any, second: Any) -> bool:
    """Return whether two contiguous arrays of one shape and dtype hold the same bits: NaN is NaN, 0.0 is not -0.0."""
    return bool(arrays.namespace(first).array_equal(arrays.byte_view(first), arrays.byte_view(second)))


def _shape_of(result: Any) -> str:
    if isinstance(result, (tuple, list)):
        return f"a {type(result).__name__} of {len(result)}"
    return f"a {type(result).__name__}"
