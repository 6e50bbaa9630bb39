"""Keras on PyTorch: gradients are reduced when the optimizer is given them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy
import torch

from mpidist.frameworks.keras import metrics
from mpidist.frameworks.keras.classes import replica_of, stock
from mpidist.frameworks.keras.half_precision import half_variables
from mpidist.frameworks.keras.inputs import given_rows
from mpidist.frameworks.keras.replica import ModelReplica
from mpidist.frameworks.keras.variables import synchronize
from mpidist.options import ReduceOp


def reduced(replica: ModelReplica, gradients: Sequence[Any], is_weighted: bool) -> list[Any]:
    """Return gradients over the global batch: sums weighted by rows in a step of a model, plain sums outside.

    With the gradients go the statistics that the step has changed, and the vote for an end.  Collective.

    Parameters
    ----------
    replica : ModelReplica
    gradients : sequence of tensor or None
    is_weighted : bool
        Whether the gradients are those of a loss that was weighted.
    """
    present = [gradient for gradient in gradients if gradient is not None]
    share, watched = replica.share, replica.steps
    statistics = watched.changed() if share is not None and watched is not None else []
    tensors = present + [each.value for each in statistics]
    if not tensors:
        return list(gradients)  # Keras says so
    arrays = [_on_host(tensor) for tensor in tensors]
    op = ReduceOp.SUM
    if share is not None:
        if not share.own_rows:
            arrays = [numpy.zeros_like(array) for array in arrays]
        elif share.is_even and not is_weighted:
            op = ReduceOp.MEAN
        else:
            first = len(present) if is_weighted else 0
            arrays[first:] = [array * array.dtype.type(share.weight) for array in arrays[first:]]
    arrays.append(numpy.array([replica.is_vote], arrays[0].dtype))
    *results, votes = replica.reduce(op, arrays)
    replica.is_stopped = replica.is_stopped or bool(votes[0])
    found = [torch.from_numpy(result).to(tensor.dtype) for result, tensor in zip(results, tensors, strict=True)]
    for variable, value in zip(statistics, found[len(present) :], strict=True):
        variable.assign(value)
    if statistics:
        watched.look()
    left = iter(found)
    return [None if gradient is None else next(left) for gradient in gradients]


def _on_host(tensor: Any) -> numpy.ndarray:
    """Return the memory of a tensor as an array; 16-bit floats are copied as float32."""
    if tensor.device.type != "cpu":
        raise NotImplementedError(
            f"a distributed Keras model on PyTorch trains on the CPU, got a gradient on {tensor.device}. With "
            'torch.set_default_device("cpu") before the model is made Keras uses the CPU; on GPUs train with '
            "mpidist.torch, or Keras on JAX"
        )
    tensor = tensor.detach()
    if tensor.is_sparse:
        tensor = tensor.to_dense()
    return tensor.float().numpy() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor.numpy()


class _BatchStatistics:
    """The variables of a model that are not trained and that its layers change in training, such as moving averages."""

    def __init__(self, model: keras.Model) -> None:
        trained = {id(each) for each in model.trainable_variables}
        self._variables = [
            each
            for each in model.non_trainable_variables
            if id(each) not in trained and keras.backend.is_float_dtype(each.dtype)
        ]
        self.look()

    def look(self) -> None:
        """Take note of how often each was written."""
        self._versions = [each.value._version for each in self._variables]

    def changed(self) -> list[Any]:
        """Return those that were written since."""
        pairs = zip(self._variables, self._versions, strict=True)
        return [each for each, version in pairs if each.value._version != version]


# -- put over the methods of a model ----------------------------------------------------------------------------------


def _make_train_function(self: Any, force: bool = False) -> Any:
    replica = replica_of(self)
    if replica is not None:
        _require_eager(self)
        replica.steps, replica.halves = _BatchStatistics(self), half_variables(self)
    return stock(self).make_train_function(force)


def _make_test_function(self: Any, force: bool = False) -> Any:
    if replica_of(self) is not None:
        _require_eager(self)
    return stock(self).make_test_function(force)


def _require_eager(model: Any) -> None:
    if model.jit_compile:
        raise NotImplementedError(
            "a distributed Keras model on PyTorch cannot be compiled by torch.compile, which does not see the "
            "communication; call model.compile(..., jit_compile=False)"
        )


def _train_step(self: Any, data: Any) -> Any:
    replica = replica_of(self)
    if replica is None:
        return stock(self).train_step(data)
    return _step(self, replica, data, stock(self).train_step)


def _test_step(self: Any, data: Any) -> Any:
    replica = replica_of(self)
    if replica is None:
        return stock(self).test_step(data)
    return _step(self, replica, data, stock(self).test_step)


def _step(model: Any, replica: ModelReplica, data: Any, stock_step: Any) -> Any:
    share = replica.next_share(given_rows(data))
    if not replica.is_synchronized:
        synchronize(replica, model)
    if replica.steps is not None:
        replica.steps.look()
    replica.factor = share.rows / share.given_rows
    kept = [] if share.own_rows else [(each, each.value.clone()) for each in model.metrics_variables]
    with replica.step(share):
        logs = stock_step(data)
    for variable, value in kept:
        variable.assign(value)
    if not replica.is_for_one_batch:
        return logs
    found = model.get_metrics_result()
    return found if found.keys() == logs.keys() else metrics.agreed(replica, logs, share.own_rows)


def is_concrete(value: Any) -> bool:
    """Return whether a tensor has values, and not a shape only.  Local."""
    return value.device.type != "meta"


METHODS = {
    "make_train_function": _make_train_function,
    "make_test_function": _make_test_function,
    "train_step": _train_step,
    "test_step": _test_step,
}
