"""The variables that layers change as they compute, such as moving averages: what becomes of the changes of replicas.

Keras' `aggregation` of a variable says it: of a "sum" the changes are added up, of "only_first_replica" the value of
replica 0 is taken, and of others the mean, weighted by rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import keras

from mpidist.frameworks.keras.variables import is_seed

_SUM, _FIRST, _MEAN = "sum", "only_first_replica", "mean"


class LayerVariable(NamedTuple):
    """A variable that is aggregated.

    Attributes
    ----------
    place : int
        Among those of the model that are not trained.
    variable : keras.Variable
    rule : str
    """

    place: int
    variable: Any
    rule: str

    def given(self, xp: Any, old: Any, new: Any, weight: Any, number: int) -> Any:
        """Return the array of this replica, of which the sum over replicas is taken.  Local.

        Parameters
        ----------
        xp : module
            That of the arrays: numpy or jax.numpy.
        old, new : array
            Before and after the step.
        weight : number
            The replica's part of the rows.
        number : int
            Of the replica.
        """
        old, new = _wide(old), _wide(new)
        if self.rule == _FIRST:
            return new if number == 0 else xp.zeros_like(new)
        value = new - old if self.rule == _SUM else new * weight
        return xp.where(weight == 0, xp.zeros_like(value), value)  # a replica without rows computes with one of another

    def result(self, old: Any, total: Any) -> Any:
        """Return the value after the step, of the sum over the replicas.  Local."""
        return _wide(old) + total if self.rule == _SUM else total


def _wide(value: Any) -> Any:
    """Return 16-bit floats, short integers and booleans as float32."""
    return value.astype("float32") if value.dtype.itemsize < 4 else value


def layer_variables(model: keras.Model) -> list[LayerVariable]:
    """Return the variables that are aggregated if a step changes them.  Local.

    Seeds are each replica's own, and so are integers without a rule: what counts steps is the same everywhere.
    """
    trained = {id(each) for each in model.trainable_variables}
    found = []
    for place, variable in enumerate(model.non_trainable_variables):
        rule = variable.aggregation if variable.aggregation in (_SUM, _FIRST) else _MEAN
        is_own = rule == _MEAN and not keras.backend.is_float_dtype(variable.dtype)
        if id(variable) not in trained and not is_seed(variable) and not is_own:
            found.append(LayerVariable(place, variable, rule))
    return found


@contextmanager
def only_added_to(variables: Sequence[LayerVariable]) -> Iterator[None]:
    """Refuse that sums get values of which it is not known what they add, for the time of a ``with`` block.  Local."""
    sums = [each.variable for each in variables if each.rule == _SUM]
    for variable in sums:
        vars(variable).update(
            assign=_refusing(variable),
            assign_add=_adding(variable, "assign_add"),
            assign_sub=_adding(variable, "assign_sub"),
        )
    try:
        yield
    finally:
        for variable in sums:
            for name in ("assign", "assign_add", "assign_sub"):
                vars(variable).pop(name, None)


def _adding(variable: Any, name: str) -> Callable[[Any], Any]:
    def adding(value: Any) -> Any:
        refusing = vars(variable).pop("assign")
        try:
            return getattr(type(variable), name)(variable, value)
        finally:
            vars(variable)["assign"] = refusing

    return adding


def _refusing(variable: Any) -> Callable[[Any], Any]:
    def refusing(value: Any) -> Any:
        raise NotImplementedError(
            f'the variable {variable.path!r} has aggregation="sum", and a layer of a distributed Keras model calls its '
            "assign(value), of which it is not known how much it adds to the sum of all replicas; call "
            "assign_add(change) or assign_sub(change)"
        )

    return refusing
