"""The variables that layers change as they compute, such as moving averages: what becomes of the changes of replicas.

Keras' `aggregation` of a variable says it: of a "sum" the changes are added up, of "only_first_replica" the value of
replica 0 is taken, and of a "mean" the mean, weighted by rows.  A variable without one is not known to be an average,
unless Keras' own layers keep it, so a change of it is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import keras

from mpidist.frameworks.keras.classes import is_of_keras
from mpidist.frameworks.keras.own_methods import put_over
from mpidist.frameworks.keras.random_numbers import is_seed

_SUM, _FIRST, _MEAN, _UNKNOWN = "sum", "only_first_replica", "mean", "unknown"

#: Layers whose subclasses keep averages in variables of these names, besides variables of their own.
_AVERAGES = {
    keras.layers.BatchNormalization: {
        "moving_mean",
        "moving_variance",
        "moving_stddev",
        "renorm_mean",
        "renorm_stddev",
    },
    keras.layers.SpectralNormalization: {"vector_u"},
}


class LayerVariable(NamedTuple):
    """A variable that is aggregated.

    `place`: among those of the model that are not trained.
    """

    place: int
    variable: Any
    rule: str

    def given(self, xp: Any, old: Any, new: Any, weight: Any, number: int) -> Any:
        """Return the array of this replica, of which the sum over replicas is taken.  Local.

        `xp`: that of the arrays: numpy, jax.numpy or torch.  `old`, `new`: before and after the step.  `weight`: the
        replica's part of the rows.  `number`: of the replica.  NotImplementedError: it is not known what becomes of the
        values of several replicas.
        """
        if self.rule == _UNKNOWN:
            has = f"aggregation={self.variable.aggregation!r} and dtype {self.variable.dtype}"
            raise NotImplementedError(
                f"a step of a distributed Keras model changes the variable {self.variable.path!r}, which has {has}: "
                "what its value over all replicas is, is not known. Say it to add_weight, or to keras.Variable: "
                'aggregation="mean" for an average over rows, in floating point; "sum" for what assign_add adds up, '
                'such as a number of rows; "only_first_replica" for what is the same on all replicas, such as a number '
                "of steps"
            )
        old, new = _wide(old), _wide(new)
        if self.rule == _FIRST:
            return new if number == 0 else xp.zeros_like(new)
        value = new - old if self.rule == _SUM else new * weight
        # a replica without rows computes with one of another
        if isinstance(weight, (int, float)):
            return value if weight else xp.zeros_like(value)
        return xp.where(weight == 0, xp.zeros_like(value), value)


def settled(rule: str, old: Any, total: Any) -> Any:
    """Return the value of a variable with a rule after a step, of the sum over the replicas.  Local."""
    return _wide(old) + total if rule == _SUM else total


def _wide(value: Any) -> Any:
    """Return 16-bit floats, short integers and booleans as float32."""
    return value.astype("float32") if value.dtype.itemsize < 4 else value


def layer_variables(model: keras.Model) -> list[LayerVariable]:
    """Return the variables that are aggregated if a step changes them.  Local.

    Seeds are each replica's own, and so are integers of Keras' own layers, which count steps.
    """
    trained = {id(each) for each in model.trainable_variables}
    averages = _averages(model)
    aggregated = []
    for place, variable in enumerate(model.non_trainable_variables):
        if id(variable) not in trained and not is_seed(variable):
            rule = _rule_of(variable, id(variable) in averages)
            if rule is not None:
                aggregated.append(LayerVariable(place, variable, rule))
    return aggregated


def _averages(model: Any) -> set[int]:
    """Return the ids of variables of which the mean is right: those of Keras' own layers, and frozen weights."""
    ids: set[int] = set()
    for layer in model._flatten_layers():
        # Private: the layer's own variables, those that were made to be trained, and others
        ids.update(map(id, layer._trainable_variables))
        is_own = not is_of_keras(type(layer))
        names = {name for kind, several in _AVERAGES.items() if isinstance(layer, kind) for name in several}
        ids.update(id(each) for each in layer._non_trainable_variables if not is_own or each.name in names)
    return ids


def _rule_of(variable: Any, is_average: bool) -> str | None:
    if variable.aggregation in (_SUM, _FIRST):
        return str(variable.aggregation)
    if keras.backend.is_float_dtype(variable.dtype):
        return _MEAN if is_average or variable.aggregation == _MEAN else _UNKNOWN
    return None if is_average else _UNKNOWN


def only_added_to(variables: Sequence[LayerVariable]) -> AbstractContextManager[None]:
    """Refuse that sums get values of which it is not known what they add, for the time of a ``with`` block.  Local."""
    sums = [each.variable for each in variables if each.rule == _SUM]
    adding = [(each, name, _adding(each, name)) for each in sums for name in ("assign_add", "assign_sub")]
    return put_over([*((each, "assign", _refusing(each)) for each in sums), *adding])


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
