"""Keras on JAX: a step is compiled in two halves, and gradients are reduced between them.

The first half is the model's own `train_step`, traced with an optimizer that notes gradients down in place of applying
them; the second half applies them.  Nothing is called back out of compiled code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import keras
import numpy

# Private: how `fit` of Keras, and a validation, go through their data
from keras.src.backend.jax import trainer as jax_trainer
from keras.src.backend.jax.trainer import JAXEpochIterator

from mpidist.frameworks.jax import cuda
from mpidist.frameworks.jax.reduction import reduce_tree
from mpidist.frameworks.keras import checks, metrics
from mpidist.frameworks.keras.classes import stock
from mpidist.frameworks.keras.current_step import in_optimizer
from mpidist.frameworks.keras.float_range import half_variables, overflown
from mpidist.frameworks.keras.inputs import InputAdapter, given_rows
from mpidist.frameworks.keras.layer_state import LayerVariable, layer_variables, only_added_to, settled
from mpidist.frameworks.keras.own_device import TensorPlace, are_on_gpu, over_replicas
from mpidist.frameworks.keras.random_numbers import is_seed, own_seed
from mpidist.frameworks.keras.replica import ModelReplica
from mpidist.frameworks.keras.shares import BatchShare
from mpidist.options import ReduceOp

#: What puts arrays elsewhere than on the rank's GPU, and what goes without one, for messages.
OTHER_DEVICES = "jax.default_device and keras.distribution"
WITHOUT_GPU = "set the environment variable JAX_PLATFORMS=cpu"


def reduced(replica: ModelReplica, gradients: Sequence[Any], is_weighted: bool) -> list[Any]:
    """Return the sums of gradients over the replicas, outside of compiled code.  Collective.

    NotImplementedError: in compiled code, which cannot communicate.
    """
    present = [gradient for gradient in gradients if gradient is not None]
    if any(isinstance(gradient, jax.core.Tracer) for gradient in present):
        raise NotImplementedError(
            f"{replica.name}: gradients are applied inside jax.jit, where they cannot be reduced over the replicas. "
            "Compile the function that computes gradients, and call optimizer.stateless_apply outside of it"
        )
    places = replica.places([gradient is not None for gradient in gradients]) if present else []
    sums, totals = over_replicas(replica, ReduceOp.SUM, present, places)
    replica.require_same_places(totals, replica.count)
    results = iter(sums)
    return [None if gradient is None else jnp.asarray(next(results)) for gradient in gradients]


def reduced_on_gpu(replica: ModelReplica, op: ReduceOp, arrays: Sequence[Any]) -> list[Any]:
    """Return arrays on one GPU reduced over the replicas.  Collective."""
    results: list[Any] = reduce_tree(list(arrays), op)
    return results


def places_of(arrays: Sequence[Any]) -> set[TensorPlace]:
    """Return where those of the arrays lie that are of JAX.  Local."""
    placements = {each.sharding for each in arrays if isinstance(each, jax.Array)}
    return {
        TensorPlace(str(device), False, device.local_hardware_id or 0)
        if cuda.has(placement)
        else TensorPlace(str(device), device.platform == "cpu", None)
        for placement in placements
        for device in placement.device_set
    }


def awaited(value: Any) -> Any:
    """Return it: JAX is given sums when the device has made them."""
    return value


def use_gpu(number: int) -> None:
    """Have JAX make arrays on a GPU, by its number, where it would on any.  Local."""
    if jax.default_backend() != "gpu" or jax.config.jax_default_device is not None:
        return
    for device in jax.local_devices():
        if device.local_hardware_id == number:
            jax.config.update("jax_default_device", device)


class _Pending:
    """Stands for an updated variable in the first half of a step, where it is not known yet: any use raises."""


def _refuse_use(*args: Any) -> NoReturn:
    raise NotImplementedError(
        "train_step of a distributed Keras model on JAX uses variables after optimizer.stateless_apply has updated "
        "them; they are updated after the step, when gradients have been reduced. Return them as they are in the "
        "state, or use the PyTorch backend"
    )


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


def _compiled(model: Any, fn: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Return a function, compiled unless the model is run eagerly."""
    return jax.jit(fn, **options) if model.jit_compile and not model.run_eagerly else fn


class _Step:
    """A step of a model.

    What is known of a trace alone, such as which variables of layers it changes, is the structure of what it returns:
    the model may be traced anew, with other layers frozen, and an earlier trace be taken again.
    """

    def __init__(self, model: Any, replica: ModelReplica) -> None:
        self._model, self._replica = model, replica

    @contextmanager
    def _tracing(self, weight: Any, factor: Any) -> Iterator[tuple[Sequence[LayerVariable], Any]]:
        """Let the model's own step be traced with a part of a batch; yields variables, and what is odd in metrics."""
        replica = self._replica
        replica.factor, replica.weight = factor, weight
        replica.weighted.clear()
        variables = layer_variables(self._model)
        try:
            with only_added_to(variables), metrics.counted(self._model, replica.count, replica) as odd:
                yield variables, odd
        finally:
            replica.factor, replica.weight = None, 1.0

    def _given(self, variables: Sequence[LayerVariable], before: Any, after: Any, weight: Any) -> dict[Any, Any]:
        """Return what this replica adds to the values of layers, by place and rule, in a step that is traced."""
        changed = [each for each in variables if after[each.place] is not before[each.place]]
        return {
            (each.place, each.rule): each.given(
                jnp, before[each.place], after[each.place], weight, self._replica.number
            )
            for each in changed
        }

    def _settled(self, before: Sequence[Any], after: Sequence[Any], totals: dict[Any, Any]) -> list[Any]:
        """Return the values after a step, those that it has changed of all replicas."""
        after = list(after)
        for (place, rule), total in totals.items():
            after[place] = jnp.asarray(settled(rule, before[place], total), after[place].dtype)
        return after


class _Forward(_Step):
    """A step of an evaluation or a prediction."""

    def __init__(self, model: Any, replica: ModelReplica, name: str) -> None:
        super().__init__(model, replica)
        self._name = name
        self._step, self._own = _compiled(model, self._traced), _compiled(model, self._whole)

    def _whole(self, state: Any, data: Any) -> Any:
        """Return what the model's own step returns, of a whole batch."""
        return getattr(stock(self._model), self._name)(state, data)

    def _traced(self, state: Any, data: Any, weight: Any, factor: Any) -> Any:
        """Return what the model's own step returns, and what it has changed."""
        with self._tracing(weight, factor) as (variables, odd):
            results, after = self._whole(state, data)
        others = after[1] if self._name == "test_step" else after
        return results, after, self._given(variables, state[1], others, weight), odd

    def __call__(self, state: Any, data: Any, share: BatchShare | None) -> Any:
        """Return what the model's own step returns.  Collective if it changes variables of layers and has a share."""
        if share is None:  # `predict_on_batch`, where every rank has all rows
            return self._own(state, data)
        with self._replica.step(share):
            outputs, after, changed, odd = self._step(state, data, share.weight, share.rows / share.given_rows)
            metrics.require_sums(odd)
            sums = over_replicas(self._replica, ReduceOp.SUM, list(changed.values()))[0] if changed else []
            totals = dict(zip(changed, sums, strict=True))
        if self._name == "test_step":
            return outputs, (after[0], self._settled(state[1], after[1], totals), after[2])
        return outputs, self._settled(state[1], after, totals)


class _Halves(_Step):
    """A training step, by its two halves."""

    def __init__(self, model: Any, replica: ModelReplica) -> None:
        super().__init__(model, replica)
        self._first_half = _compiled(model, self._first)
        self._second_half = _compiled(model, self._second, donate_argnums=(0, 1))
        self._optimizer: Any = None

    def _first(self, state: Any, data: Any, weight: Any, factor: Any) -> Any:
        """Return logs, weighted gradients, variables that are not trained, those of metrics, changes, odd metrics."""
        replica = self._replica
        with self._tracing(weight, factor) as (variables, odd):
            logs, after, self._optimizer, collected = _noted(self._model, replica, state, data)
        part = weight if id(self._optimizer) not in replica.weighted else jnp.where(weight == 0, 0.0, 1.0)
        gradients = [None if each is None else _weighted(each, part) for each in collected]
        return logs, gradients, after[1], after[3], self._given(variables, state[1], after[1], weight), odd

    def _second(self, trainable: Any, optimizer_variables: Any, gradients: Any) -> Any:
        """Return the updated variables, and those of the optimizer."""
        pairs = zip(gradients, trainable, strict=True)
        sums = [None if each is None else each.astype(variable.dtype) for each, variable in pairs]
        sums = overflown(sums, self._model.trainable_variables, self._replica.halves)
        with in_optimizer():
            return self._optimizer.stateless_apply(optimizer_variables, sums, trainable)

    def __call__(self, state: Any, data: Any, share: BatchShare) -> Any:
        """Return logs and state.  Collective."""
        replica = self._replica
        trainable, before, optimizer_variables, _ = state
        with replica.step(share):
            logs, gradients, others, metrics_variables, changed, odd = self._first_half(
                state, data, share.weight, share.rows / share.given_rows
            )
            metrics.require_sums(odd)
            present = [each for each in gradients if each is not None]
            arrays = [*present, *changed.values()]
            has = replica.places([each is not None for each in gradients])
            results, totals = over_replicas(replica, ReduceOp.SUM, arrays, has)
            replica.require_same_places(totals, replica.count)
            sums = iter(results)  # of gradients, and then of changes
            gradients = [None if each is None else next(sums) for each in gradients]
            trainable, optimizer_variables = self._second_half(trainable, optimizer_variables, gradients)
        others = self._settled(before, others, dict(zip(changed, sums, strict=True)))
        return logs, (trainable, others, optimizer_variables, metrics_variables)


def _noted(model: Any, replica: ModelReplica, state: Any, data: Any) -> tuple[Any, Any, Any, Sequence[Any]]:
    """Return logs and state of a model's own step, its optimizer, and the gradients that this has not applied.  Local.

    NotImplementedError: the step applies no gradients, does so twice, or goes on with variables that are not updated
    yet.
    """
    replica.collected = []
    try:
        logs, after = stock(model).train_step(state, data)
        applied = replica.collected
    finally:
        replica.collected = None
    if not applied:
        raise NotImplementedError(
            "train_step of a distributed Keras model on JAX must apply gradients by optimizer.stateless_apply, of "
            "the optimizer that the model was compiled with; it did not, so each replica would train by itself"
        )
    ((optimizer, collected),) = applied
    if not collected.is_in(after):
        _refuse_use()
    return logs, after, optimizer, collected.gradients


def _gradients(model: Any, replica: Any, state: Any, data: Any) -> Any:
    """Return logs, gradients, what is odd in metrics, variables that are not trained, and those of metrics."""
    is_part = replica.share is not None
    variables = layer_variables(model) if is_part else ()
    with only_added_to(variables), metrics.counted(model, replica.workers, is_part=is_part) as odd:
        logs, after, optimizer, gradients = _noted(model, replica, state, data)
    checks.require_compiled_optimizer(model, optimizer)
    return logs, gradients, odd, after[1], after[3]


def gradients_of_step(model: Any, replica: Any, data: Any) -> tuple[dict[str, Any], list[Any]]:
    """Return logs and gradients of a model's own step, by trainable variable; None where there is none.  Local.

    Layers and metrics keep what the step makes of them.
    """
    if replica.steps is None:
        replica.steps = _compiled(model, partial(_gradients, model, replica))
    others, metrics_variables = model.non_trainable_variables, model.metrics_variables
    groups = model.trainable_variables, others, model.optimizer.variables, metrics_variables
    state = tuple([each.value for each in group] for group in groups)
    logs, gradients, odd, *after = replica.steps(state, data)
    metrics.require_sums(odd)
    for variable, value in zip((*others, *metrics_variables), (*after[0], *after[1]), strict=True):
        variable.assign(value)
    return logs, [None if each is None else numpy.asarray(each) for each in gradients]


def stamp(variable: Any) -> Any:
    """Return what `is_written` takes.  Local."""
    return variable.value


def is_written(variable: Any, stamp: Any) -> bool:
    """Return whether a variable was written since a stamp.  Local."""
    return variable.value is not stamp


def _weighted(value: Any, weight: Any) -> Any:
    """Return a value times a weight; zeros for a weight of 0, of infinite values too.  16-bit floats become float32."""
    value = value.astype(jnp.float32) if value.dtype.itemsize < 4 else value
    return jnp.where(weight == 0, jnp.zeros_like(value), value * weight)


# -- put over the methods of a model ----------------------------------------------------------------------------------


def make_function(model: Any, replica: ModelReplica, name: str, force: bool = False) -> None:
    """Make what `fit`, `evaluate` or `predict` calls for each batch, by a method's name.  Local.

    NotImplementedError, for `fit`: variables lie where nothing is reduced.
    """
    _, kind, function = name.split("_")
    if getattr(model, f"{kind}_{function}") is not None and not force:
        return
    steps = replica.steps = replica.steps or {}
    if kind == "train":
        are_on_gpu(replica, [each.value for each in model.variables])
        steps["train_step"], replica.halves = _Halves(model, replica), half_variables(model)
    else:
        steps[f"{kind}_step"] = _Forward(model, replica, f"{kind}_step")
    is_compiled, model.jit_compile = model.jit_compile, False  # the parts of the step are, and it is given values
    try:
        getattr(stock(model), name)(force)
    finally:
        model.jit_compile = is_compiled


def step(model: Any, replica: ModelReplica, name: str, state: Any, data: Any) -> Any:
    """Take a step, by a method's name, on this replica's rows of a batch; return logs or predictions, and state.

    Collective; a prediction is where layers change.
    """
    if name == "predict_step":
        return replica.steps[name](state, data, replica.next_share(given_rows(data)) if replica.shares else None)
    share = replica.next_share(given_rows(data))
    if not replica.is_synchronized:
        state = _synchronized(replica, model, state)
    logs, (*after, metrics_variables) = replica.steps[name](state, data, share)
    kept = metrics_variables if share.own_rows else state[-1]
    logs = _logs_of_batch(model, replica, logs, kept, share.own_rows) if replica.is_for_one_batch else logs
    return logs, (*after, kept)


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


def value_and_grad(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that returns loss and gradients by the first argument, a list of arrays.  Local."""
    return jax.jit(jax.value_and_grad(fn))


#: Returns a function, which makes no gradients, compiled.  Local.
without_gradients = jax.jit


def is_concrete(value: Any) -> bool:
    """Return whether an array has values, and is not one that is traced.  Local."""
    return not isinstance(value, jax.core.Tracer)


def own_dropout(thread: int) -> AbstractContextManager[None]:
    """Do nothing: on JAX dropout asks the generator of its layer.  Local."""
    return nullcontext()


def buffers(model: Any) -> list[tuple[str, Any]]:
    """Return nothing: on JAX a model has variables only.  Local."""
    return []


def share_buffers(replica: ModelReplica, model: Any) -> None:
    """Do nothing, as there are none.  Local."""


class EpochIterator(JAXEpochIterator):
    """Has each batch when it is its turn: on a GPU Keras asks for one more, and that counted as the one under way."""

    def _get_iterator(self) -> Any:
        if isinstance(self.data_adapter, InputAdapter) and keras.distribution.distribution() is None:
            return self.data_adapter.get_jax_iterator()
        return super()._get_iterator()


def take_in_turn() -> None:
    """Have Keras take batches of mpidist in their turn; others as ever.  Local."""
    jax_trainer.JAXEpochIterator = EpochIterator
