"""Keras on PyTorch: gradients are reduced when the optimizer is given them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from threading import get_ident
from typing import Any

import keras
import numpy
import torch

# Private: where Keras makes tensors, and what layers draw by
from keras.src.backend.torch import core as torch_core
from keras.src.backend.torch import random as torch_random

# Private: a validation goes through its data as `fit` of Keras does
from keras.src.backend.torch.trainer import TorchEpochIterator

from mpidist.frameworks.keras import checks, metrics
from mpidist.frameworks.keras.backends import to_numpy
from mpidist.frameworks.keras.classes import stock
from mpidist.frameworks.keras.float_range import half_variables
from mpidist.frameworks.keras.inputs import given_rows
from mpidist.frameworks.keras.layer_state import layer_variables, only_added_to, settled
from mpidist.frameworks.keras.own_device import TensorPlace, are_on_gpu, over_replicas
from mpidist.frameworks.keras.own_methods import put_over
from mpidist.frameworks.keras.replica import ModelReplica
from mpidist.frameworks.keras.shares import BatchShare
from mpidist.frameworks.keras.variables import synchronize
from mpidist.frameworks.torch import cuda
from mpidist.frameworks.torch.tensors import array_of, is_on_host
from mpidist.options import ReduceOp

#: What puts tensors elsewhere than on the rank's GPU, and what goes without one, for messages.
OTHER_DEVICES = "keras.device"
WITHOUT_GPU = "set the environment variable KERAS_TORCH_DEVICE=cpu before Keras is imported"


def reduced(replica: ModelReplica, gradients: Sequence[Any], is_weighted: bool) -> list[Any]:
    """Return gradients over the global batch: sums weighted by rows in a step of a model, plain sums outside.

    With the gradients go the statistics that the step has changed, and the vote for an end.  Collective.

    `is_weighted`: whether the gradients are those of a loss that was weighted.
    """
    present = [gradient for gradient in gradients if gradient is not None]
    share, watched = replica.share, replica.steps
    changed = watched.changed() if share is not None and watched is not None else []
    if not present and not changed:
        return list(gradients)  # Keras says so
    is_plain = not changed and not is_weighted
    op = ReduceOp.MEAN if share is not None and share.is_even and is_plain else ReduceOp.SUM
    own = [_wide(tensor) for tensor in present]
    if share is not None and not share.own_rows:
        own = [torch.zeros_like(tensor) for tensor in own]
    elif share is not None and op == ReduceOp.SUM and not is_weighted:
        own = [tensor * share.weight for tensor in own]
    places = replica.places([gradient is not None for gradient in gradients]) if own else []
    state = watched.given(replica, changed) if changed else []
    results, totals = _over_replicas(replica, op, [*own, *state], places)
    replica.require_same_places(totals, 1 if op == ReduceOp.MEAN else replica.count)
    if changed:
        watched.settle(changed, results[len(own) :])
    pairs = zip(results, present, strict=False)
    left = iter([result.to(tensor.dtype) for result, tensor in pairs])
    return [None if gradient is None else next(left) for gradient in gradients]


def _over_replicas(
    replica: ModelReplica, op: ReduceOp, tensors: Sequence[Any], notes: Sequence[numpy.ndarray] = ()
) -> tuple[list[Any], list[numpy.ndarray]]:
    """Return tensors, as such, and notes, reduced over the replicas: see `over_replicas`.  Collective."""
    results, totals = over_replicas(replica, op, tensors, notes)
    return [torch.as_tensor(result) for result in results], totals


def reduced_on_gpu(replica: ModelReplica, op: ReduceOp, tensors: Sequence[Any]) -> list[Any]:
    """Return tensors on one GPU reduced over the replicas.  Collective."""
    with cuda.in_order_of(tensors[0]):
        copies = [tensor.clone(memory_format=torch.contiguous_format) for tensor in tensors]
        replica.replicas.reduce(op.verb, [array_of(copy) for copy in copies], "a tensor of a Keras model")
    return copies


def places_of(tensors: Sequence[Any]) -> set[TensorPlace]:
    """Return where tensors lie.  Local."""
    return {
        TensorPlace(str(each.device), False, each.get_device())
        if cuda.has(each)
        else TensorPlace(str(each.device), is_on_host(each), None)
        for each in tensors
    }


def awaited(value: Any) -> Any:
    """Return a tensor, or that of a variable, when its device has come so far."""
    found = value.value if isinstance(value, keras.Variable) else value
    return cuda.awaited(found) if isinstance(found, torch.Tensor) else found


def use_gpu(number: int) -> None:
    """Have Keras make tensors on a GPU, by its number, where it would on any.  Local."""
    if torch_core.DEFAULT_DEVICE == "cuda" and type(torch_core.DEFAULT_DEVICE) is str:
        torch_core.DEFAULT_DEVICE = _OneOfCuda(f"cuda:{number}")  # in all threads
        torch.cuda.set_device(number)


class _OneOfCuda(str):
    """The name of one GPU, which Keras takes for that of any: it compares names with ``"cuda"``."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return other == "cuda" or str(self) == other

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = str.__hash__


def _wide(tensor: Any) -> Any:
    """Return a dense tensor without a gradient: 16-bit floats, short integers and booleans as float32."""
    tensor = tensor.detach()
    if tensor.is_sparse:
        tensor = tensor.to_dense()
    return tensor.float() if tensor.dtype.itemsize < 4 else tensor


class _WatchedState:
    """The state of the layers of a model, and whether a step has changed it."""

    def __init__(self, model: keras.Model) -> None:
        self.variables = layer_variables(model)
        self._buffers = buffers(model)
        self.look()

    def look(self) -> None:
        """Take note of how often each was written, and of what sums are."""
        self._versions = [each.variable.value._version for each in self.variables]
        self._before = [each.variable.value.detach().clone() if each.rule == "sum" else None for each in self.variables]
        self._buffer_versions = [buffer._version for _, buffer in self._buffers]

    def changed(self) -> list[int]:
        """Return the numbers of those that were written since.

        NotImplementedError: buffers of a module of PyTorch were.
        """
        for (name, buffer), version in zip(self._buffers, self._buffer_versions, strict=True):
            if buffer._version != version:
                raise NotImplementedError(
                    f"a step of a distributed Keras model changes {name!r}, a buffer of a module of PyTorch, of which "
                    "each replica would have another; use a layer of Keras in its place, such as "
                    "keras.layers.BatchNormalization, or mpidist.torch for a model of PyTorch"
                )
        pairs = enumerate(zip(self.variables, self._versions, strict=True))
        return [at for at, (each, version) in pairs if each.variable.value._version != version]

    def given(self, replica: ModelReplica, changed: Sequence[int]) -> list[Any]:
        """Return what this replica adds to the results."""
        weight = replica.share.weight if replica.share is not None else 1.0
        return [self.variables[at].given(torch, *self._old_and_new(at), weight, replica.number) for at in changed]

    def settle(self, changed: Sequence[int], totals: Sequence[Any]) -> None:
        """Give those that were written their values over all replicas."""
        for at, total in zip(changed, totals, strict=True):
            each = self.variables[at]
            value = settled(each.rule, self._old_and_new(at)[0], total)
            type(each.variable).assign(each.variable, value.to(each.variable.value.dtype))
        self.look()

    def _old_and_new(self, at: int) -> tuple[Any, Any]:
        new, old = self.variables[at].variable.value, self._before[at]
        return _wide(new if old is None else old), _wide(new)


# -- put over the methods of a model ----------------------------------------------------------------------------------


def make_function(model: Any, replica: ModelReplica, name: str, force: bool = False) -> Any:
    """Make what `fit`, `evaluate` or `predict` calls for each batch, by a method's name, and return it.  Local.

    NotImplementedError: it would be compiled, or its variables lie where nothing is reduced.
    """
    _refuse_compiled(model)
    if name == "make_train_function":
        are_on_gpu(replica, [each.value for each in model.variables])
    replica.steps, replica.halves = _WatchedState(model), half_variables(model)
    return getattr(stock(model), name)(force)


def _refuse_compiled(model: Any) -> None:
    if model.jit_compile:
        raise NotImplementedError(
            "a distributed Keras model on PyTorch cannot be compiled by torch.compile, which does not see the "
            "communication; call model.compile(..., jit_compile=False)"
        )


def step(model: Any, replica: ModelReplica, name: str, data: Any) -> Any:
    """Take a step, by a method's name, on this replica's rows of a batch; return logs or predictions.

    Collective; a prediction is where layers change.
    """
    stock_step = partial(getattr(stock(model), name), data)
    if name == "predict_step":
        if not replica.shares:  # `predict_on_batch`, where every rank has all rows
            return stock_step()
        return _settled(replica, replica.next_share(given_rows(data)), stock_step)
    share = replica.next_share(given_rows(data))
    if not replica.is_synchronized:
        synchronize(replica, model)
    replica.factor = share.rows / share.given_rows
    kept = [] if share.own_rows else [(each, each.value.clone()) for each in model.metrics_variables]
    with metrics.counted(model, replica.count, replica) as odd:
        logs = _settled(replica, share, stock_step)
    metrics.require_sums(odd)
    for variable, value in kept:
        variable.assign(value)
    if not replica.is_for_one_batch:
        # a metric may return its variable itself, in which a validation counts before Keras reads the logs of the epoch
        return keras.tree.map_structure(lambda log: log.clone() if torch.is_tensor(log) else log, logs)
    found = model.get_metrics_result()
    return found if found.keys() == logs.keys() else metrics.agreed(replica, logs, share.own_rows)


def _settled(replica: ModelReplica, share: BatchShare, step: Callable[[], Any]) -> Any:
    """Take a step; what it has changed, and not reduced, is reduced then.  Collective."""
    watched = replica.steps
    watched.look()
    with replica.step(share):
        with only_added_to(watched.variables):
            results = step()
        changed = watched.changed()
        if changed:
            watched.settle(changed, _over_replicas(replica, ReduceOp.SUM, watched.given(replica, changed))[0])
    return results


def gradients_of_step(model: Any, replica: Any, data: Any) -> tuple[dict[str, Any], list[Any]]:
    """Return logs and gradients of a model's own step, by trainable variable; None where there is none.  Local.

    NotImplementedError: the step applies no gradients, does so more than once, by another optimizer, or for other
    variables; or the model has buffers of PyTorch.
    """
    if not isinstance(replica.steps, _WatchedState):
        _refuse_compiled(model)
        replica.steps = _WatchedState(model)
    replica.steps.look()
    replica.collected = []
    try:
        is_part = replica.share is not None
        variables = replica.steps.variables if is_part else ()
        with only_added_to(variables), metrics.counted(model, replica.workers, is_part=is_part) as odd:
            logs = stock(model).train_step(keras.tree.map_structure(_as_tensor, data))
        applied = replica.collected
    finally:
        replica.collected = None
    metrics.require_sums(odd)
    replica.steps.changed()  # raises where buffers were
    if len(applied) != 1:
        raise NotImplementedError(
            f"train_step of this model calls optimizer.apply {len(applied)} times, and servers are given the gradients "
            "of one call; apply all gradients at once, by the optimizer that the model was compiled with"
        )
    ((optimizer, gradients, variables),) = applied
    checks.require_compiled_optimizer(model, optimizer)
    known = {id(each): gradient for each, gradient in zip(variables, gradients, strict=True) if gradient is not None}
    found_all = [
        to_numpy(_wide(known.pop(id(each)))) if id(each) in known else None for each in model.trainable_variables
    ]
    if known:
        paths = [each.path for each in variables if id(each) in known]
        raise NotImplementedError(
            f"train_step of this model applies gradients for {paths}, which are not among its trainable variables, and "
            "servers hold these alone: let the model have the layer as an attribute, and let it be trainable"
        )
    return logs, found_all


def stamp(variable: Any) -> int:
    """Return what `is_written` takes.  Local."""
    version: int = variable.value._version
    return version


def is_written(variable: Any, stamp: int) -> bool:
    """Return whether a variable was written since a stamp.  Local."""
    return bool(variable.value._version != stamp)


def _as_tensor(leaf: Any) -> Any:
    return None if leaf is None else keras.ops.convert_to_tensor(leaf)


def value_and_grad(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that returns loss and gradients by the first argument, a list of arrays.  Local."""

    def with_gradients(arrays: Sequence[Any], *arguments: Any) -> tuple[Any, list[Any]]:
        leaves = [keras.ops.convert_to_tensor(each).detach().clone().requires_grad_() for each in arrays]
        loss = fn(leaves, *arguments)
        found = torch.autograd.grad(loss, leaves, allow_unused=True)
        pairs = zip(leaves, found, strict=True)
        gradients = [torch.zeros_like(leaf) if gradient is None else gradient for leaf, gradient in pairs]
        return loss.detach(), [cuda.awaited(gradient).cpu() for gradient in gradients]

    return with_gradients


def without_gradients(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function, which makes no gradients.  Local."""
    return torch.no_grad()(fn)


def is_concrete(value: Any) -> bool:
    """Return whether a tensor has values, and not a shape only.  Local."""
    return value.device.type != "meta"


def own_dropout(thread: int) -> AbstractContextManager[None]:
    """Let dropout without a seed in a thread ask its layer's generator, a replica's own, for a ``with`` block.  Local.

    Keras has it ask PyTorch's, which may be alike on all replicas.
    """
    of_keras = torch_random.dropout

    def dropout(inputs: Any, rate: float, noise_shape: Any = None, seed: Any = None) -> Any:
        is_seeded = not (
            seed is None or isinstance(seed, keras.random.SeedGenerator) and seed.get_config()["seed"] is None
        )
        if is_seeded or noise_shape is not None or not 0 < rate < 1 or get_ident() != thread:
            return of_keras(inputs, rate, noise_shape, seed)
        generator = torch_random.torch_seed_generator(seed)
        return inputs * torch.empty_like(inputs).bernoulli_(1 - rate, generator=generator).div_(1 - rate)

    return put_over([(torch_random, "dropout", dropout)])


def share_buffers(replica: ModelReplica, model: Any) -> None:
    """Give the modules of PyTorch in a model the chief's buffers.  Collective."""
    own = [buffer for _, buffer in buffers(model)]
    if own:
        values = replica.from_chief([to_numpy(each) for each in own])
        with torch.no_grad():
            for buffer, value in zip(own, values, strict=True):
                buffer.copy_(torch.as_tensor(value))


def buffers(model: Any) -> list[tuple[str, Any]]:
    """Return the names and the buffers of the modules of PyTorch in a model, which are no variables.  Local."""
    wrappers = [each for each in model._flatten_layers() if isinstance(each, keras.layers.TorchModuleWrapper)]
    return [(f"{layer.path}.{name}", each) for layer in wrappers for name, each in layer.module.named_buffers()]


EpochIterator = TorchEpochIterator
