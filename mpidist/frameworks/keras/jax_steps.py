"""Keras on JAX: a step is compiled in two halves, and gradients are reduced between them.

The first half is the model's own `train_step`, traced with an optimizer that notes gradients down in place of applying
them; the second half applies them.  Nothing is called back out of compiled code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy

from mpidist.frameworks.keras import metrics
from mpidist.frameworks.keras.classes import replica_of, stock
from mpidist.frameworks.keras.half_precision import half_variables, overflown
from mpidist.frameworks.keras.inputs import given_rows
from mpidist.frameworks.keras.replica import ModelReplica
from mpidist.frameworks.keras.under_way import in_optimizer
from mpidist.frameworks.keras.variables import is_seed, own_seed
from mpidist.options import ReduceOp


def reduced(replica: ModelReplica, gradients: Sequence[Any], is_weighted: bool) -> list[Any]:
    """Return the sums of gradients over the replicas, outside of compiled code.  Collective.

    Raises
    ------
    NotImplementedError
        In compiled code, which cannot communicate.
    """
    present = [gradient for gradient in gradients if gradient is not None]
    if any(isinstance(gradient, jax.core.Tracer) for gradient in present):
        raise NotImplementedError(
            f"{replica.name}: gradients are applied inside jax.jit, where they cannot be reduced over the replicas. "
            "Compile the function that computes gradients, and call optimizer.stateless_apply outside of it"
        )
    results = iter(replica.reduce(ReduceOp.SUM, [numpy.asarray(gradient) for gradient in present]))
    return [None if gradient is None else jnp.asarray(next(results)) for gradient in gradients]


class _Pending:
    """Stands for an updated variable in the first half of a step, where it is not known yet: any use raises."""


def _refuse_use(*args: Any) -> NoReturn:
    raise _used_too_early()


_ARITHMETIC = ("add", "sub", "mul", "truediv", "matmul", "pow")
for _name in (*_ARITHMETIC, *(f"r{each}" for each in _ARITHMETIC), "neg", "abs", "getitem", "array", "jax_array"):
    setattr(_Pending, f"__{_name}__", _refuse_use)


class _Collected:
    """The gradients of a step, and what was returned in place of the updated variables."""

    def __init__(self, gradients: Sequence[Any], trainable: Sequence[Any], optimizer: Sequence[Any]) -> None:
        self.gradients = gradients
        self.trainable: list[Any] = [_Pending() for _ in trainable]
        self.optimizer: list[Any] = [_Pending() for _ in optimizer]

    def is_in(self, state: Sequence[Any]) -> bool:
        """Whether a step returned the updated variables as it got them."""
        pairs = ((self.trainable, state[0]), (self.optimizer, state[2]))
        return all(
            len(mine) == len(given) and all(one is other for one, other in zip(mine, given, strict=True))
            for mine, given in pairs
        )


def _used_too_early() -> NotImplementedError:
    return NotImplementedError(
        "train_step of a distributed Keras model on JAX uses variables after optimizer.stateless_apply has updated "
        "them; they are updated after the step, when gradients have been reduced. Return them as they are in the "
        "state, or use the PyTorch backend"
    )


def collect(
    replica: ModelReplica,
    optimizer: Any,
    optimizer_variables: Sequence[Any],
    gradients: Sequence[Any],
    trainable_variables: Sequence[Any],
) -> tuple[list[Any], list[Any]]:
    """Note gradients down, and return what stands for the updated variables.  Local."""
    assert replica.collected is not None
    if replica.collected:
        raise NotImplementedError(
            "train_step of a distributed Keras model on JAX applies gradients more than once; such a step is trained "
            "with the PyTorch backend"
        )
    collected = _Collected(gradients, trainable_variables, optimizer_variables)
    replica.collected.append((optimizer, collected))
    return collected.trainable, collected.optimizer


class _Halves:
    """The two halves of a training step, compiled unless the model is run eagerly."""

    def __init__(self, model: Any, replica: ModelReplica) -> None:
        self._model, self._replica = model, replica
        is_compiled = model.jit_compile and not model.run_eagerly
        self.first: Callable[..., Any] = jax.jit(self._first) if is_compiled else self._first
        self.second: Callable[..., Any] = jax.jit(self._second, donate_argnums=(0, 1)) if is_compiled else self._second
        self._optimizer: Any = None
        self._is_present: list[bool] = []
        #: Numbers of the variables that are not trained and that the step changes, known when it was traced.
        self.statistics: list[int] = []

    def _first(self, state: Any, data: Any, weight: Any, factor: Any) -> Any:
        """Return logs, weighted gradients, variables that are not trained, those of metrics, weighted statistics."""
        replica = self._replica
        before = state[1]
        replica.collected, replica.factor, replica.weight = [], factor, weight
        replica.weighted.clear()
        try:
            logs, after = stock(self._model).train_step(state, data)
            found, replica.collected = replica.collected, None
        finally:
            replica.collected = replica.factor = None
        if not found:
            raise NotImplementedError(
                "train_step of a distributed Keras model on JAX must apply gradients by optimizer.stateless_apply, of "
                "the optimizer that the model was compiled with; it did not, so each replica would train by itself"
            )
        ((self._optimizer, collected),) = found
        if not collected.is_in(after):
            raise _used_too_early()
        self._is_present = [gradient is not None for gradient in collected.gradients]
        part = weight if id(self._optimizer) not in replica.weighted else jnp.where(weight == 0, 0.0, 1.0)
        gradients = [_weighted(each, part) for each in collected.gradients if each is not None]
        pairs = list(enumerate(zip(before, after[1], strict=True)))
        self.statistics = [at for at, (old, new) in pairs if new is not old and jnp.issubdtype(new.dtype, jnp.floating)]
        statistics = [_weighted(after[1][at], weight) for at in self.statistics]
        return logs, gradients, after[1], after[3], statistics

    def _second(self, trainable: Any, optimizer_variables: Any, gradients: Any) -> Any:
        """Return the updated variables, and those of the optimizer."""
        results = iter(gradients)
        given = [
            next(results).astype(variable.dtype) if is_present else None
            for is_present, variable in zip(self._is_present, trainable, strict=True)
        ]
        given = overflown(given, self._model.trainable_variables, self._replica.halves)
        with in_optimizer():
            return self._optimizer.stateless_apply(optimizer_variables, given, trainable)


def _weighted(value: Any, weight: Any) -> Any:
    """Return a value times a weight; zeros for a weight of 0, of infinite values too.  16-bit floats become float32."""
    value = value.astype(jnp.float32) if value.dtype.itemsize < 4 else value
    return jnp.where(weight == 0, jnp.zeros_like(value), value * weight)


# -- put over the methods of a model ----------------------------------------------------------------------------------


def _make_train_function(self: Any, force: bool = False) -> Any:
    replica = replica_of(self)
    if replica is None:
        return stock(self).make_train_function(force)
    if self.train_function is None or force:
        _require_host()
        replica.steps, replica.halves = _Halves(self, replica), half_variables(self)
        _without_jit(self, stock(self).make_train_function, force)


def _require_host() -> None:
    """Raise NotImplementedError where gradients would have to be copied from a device in each step."""
    if jax.default_backend() != "cpu":
        raise NotImplementedError(
            f"a distributed Keras model on JAX trains on the CPU, and JAX computes on {jax.default_backend()}. Set the "
            "environment variable JAX_PLATFORMS=cpu, or reduce gradients yourself with mpidist.jax"
        )


def _make_test_function(self: Any, force: bool = False) -> Any:
    replica = replica_of(self)
    if replica is None:
        return stock(self).make_test_function(force)
    if self.test_function is None or force:
        replica.test_step = _test_function(self, replica)
        _without_jit(self, stock(self).make_test_function, force)


def _test_function(model: Any, replica: ModelReplica) -> Callable[..., Any]:
    """Return the model's own step of an evaluation, which takes the loss factor too."""

    def step(state: Any, data: Any, factor: Any) -> Any:
        replica.factor = factor
        try:
            return stock(model).test_step(state, data)
        finally:
            replica.factor = None

    return jax.jit(step) if model.jit_compile and not model.run_eagerly else step


def _without_jit(model: Any, make: Callable[[bool], Any], force: bool) -> None:
    """Make a function that calls the step with arrays that have values: its parts are compiled here."""
    is_compiled, model.jit_compile = model.jit_compile, False
    try:
        make(force)
    finally:
        model.jit_compile = is_compiled


def _train_step(self: Any, state: Any, data: Any) -> Any:
    replica = replica_of(self)
    if replica is None:
        return stock(self).train_step(state, data)
    share = replica.next_share(given_rows(data))
    if not replica.is_synchronized:
        state = _synchronized(replica, self, state)
    trainable, _, optimizer_variables, metrics_variables = state
    halves = replica.steps
    with replica.step(share):
        logs, gradients, others, new_metrics, statistics = halves.first(
            state, data, share.weight, share.rows / share.given_rows
        )
        arrays = [numpy.asarray(each) for each in (*gradients, *statistics)]
        arrays.append(numpy.array([replica.is_vote], arrays[0].dtype))
        *results, votes = replica.reduce(ReduceOp.SUM, arrays)
        replica.is_stopped = replica.is_stopped or bool(votes[0])
        trainable, optimizer_variables = halves.second(trainable, optimizer_variables, results[: len(gradients)])
    for at, value in zip(halves.statistics, results[len(gradients) :], strict=True):
        others[at] = jnp.asarray(value, others[at].dtype)
    kept = new_metrics if share.own_rows else metrics_variables
    logs = _logs_of_batch(self, replica, logs, kept, share.own_rows) if replica.is_for_one_batch else logs
    return logs, (trainable, others, optimizer_variables, kept)


def _test_step(self: Any, state: Any, data: Any) -> Any:
    replica = replica_of(self)
    if replica is None:
        return stock(self).test_step(state, data)
    share = replica.next_share(given_rows(data))
    if not replica.is_synchronized:
        state = _synchronized(replica, self, state)
    with replica.step(share):
        logs, after = replica.test_step(state, data, share.rows / share.given_rows)
    kept = after[2] if share.own_rows else state[2]
    logs = _logs_of_batch(self, replica, logs, kept, share.own_rows) if replica.is_for_one_batch else logs
    return logs, (after[0], after[1], kept)


def _logs_of_batch(model: Any, replica: ModelReplica, logs: Any, values: Any, rows: int) -> Any:
    """Return the logs of one global batch.  Collective."""
    found = metrics.results(replica, model.metrics_variables, values, stock(model).get_metrics_result)
    return found if found.keys() == logs.keys() else metrics.agreed(replica, logs, rows)


def _synchronized(replica: ModelReplica, model: Any, state: Any) -> Any:
    """Return the chief's state, with a seed of this replica.  Collective."""
    leaves, structure = jax.tree.flatten(state)
    values = replica.from_chief([numpy.asarray(leaf) for leaf in leaves])
    state = jax.tree.unflatten(structure, [jnp.asarray(value) for value in values])
    for at, variable in enumerate(model.non_trainable_variables):
        if is_seed(variable):
            state[1][at] = jnp.asarray(own_seed(numpy.asarray(state[1][at]), replica.number))
    replica.is_synchronized = True
    return state


def is_concrete(value: Any) -> bool:
    """Return whether an array has values, and is not one that is traced.  Local."""
    return not isinstance(value, jax.core.Tracer)


METHODS = {
    "make_train_function": _make_train_function,
    "make_test_function": _make_test_function,
    "train_step": _train_step,
    "test_step": _test_step,
}
