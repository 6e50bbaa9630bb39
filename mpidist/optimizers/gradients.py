"""Gradients as users give them: checked, converted, summed over the replicas."""

from __future__ import annotations

import warnings
from typing import Any

import numpy

from mpidist import arrays, context
from mpidist.optimizers import sparse
from mpidist.options import ReduceOp
from mpidist.variables import DistributedVariable, IndexedSlices
from mpidist.variables.variable import OWN_SCOPE, mixed_text


def checked_gradients(pairs: list[Any]) -> tuple[list[Any], list[Any]]:
    """Return gradients, of their variables' dtypes, and variables; those without a gradient left out.  Local.

    Errors as for `Optimizer.apply_gradients`.
    """
    _require_pairs(pairs)
    pairs = _with_gradients(pairs)
    variables = [variable for _, variable in pairs]
    _require_replica_context(variables)
    return [_as_gradient(gradient, variable) for gradient, variable in pairs], variables


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


def place_of_call() -> Any:
    """Return what the answer of `_require_replica_context` depends on, besides the variables."""
    return context.get_strategy(), context.in_cross_replica_context()


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
        warnings.warn(f"gradients are None for the variables {names}; they are not updated", stacklevel=4)
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
    if context.is_default(variable.strategy):
        return f"variable {variable.name!r} was not created in the scope of {strategy}; {OWN_SCOPE}"
    return mixed_text(variable, "`apply_gradients` was called", strategy)


def _as_gradient(gradient: Any, variable: Any) -> Any:
    """Return the gradient as an array, or as rows, of its variable's kind and dtype."""
    is_rows = isinstance(gradient, IndexedSlices)
    values = gradient.values if is_rows else arrays.to_array(gradient)
    if not (arrays.is_device(values) or issubclass(variable.array_type, numpy.ndarray)):
        raise TypeError(
            f"the gradient for variable {variable.name!r} is a {arrays.kind_of(values).name} array in host memory, and "
            f"the variable is a {arrays.kind_of(variable.live).name} array; copy the gradient there, as by cupy.asarray"
        )
    values = where_variable_lies(values, variable)
    if is_rows:
        indices = where_variable_lies(gradient.indices, variable)
        is_there = values is gradient.values and indices is gradient.indices
        rows = gradient if is_there else IndexedSlices(values, indices, gradient.dense_shape)
        return sparse.rows_of_variable(rows, variable)
    gradient = values
    if gradient.shape != variable.shape:
        raise ValueError(
            f"the gradient for variable {variable.name!r} has shape {gradient.shape}, expected {variable.shape}"
        )
    return sparse.of_dtype(gradient, variable)


def where_variable_lies(values: Any, variable: Any) -> Any:
    """Return values of a gradient, on the host if its variable is an array there.  Local."""
    return arrays.on_host(values) if issubclass(variable.array_type, numpy.ndarray) else values


def sum_over_replicas(gradients: list[Any], variables: list[Any]) -> list[Any]:
    """Return the sums over all replicas: arrays in one fused call, then rows one by one.  Collective."""
    extended, reduced = context.get_strategy().extended, list(gradients)
    dense = [number for number, each in enumerate(gradients) if not isinstance(each, IndexedSlices)]
    if dense:
        destinations = [variables[number] for number in dense]
        sums = extended.reduce_arrays(ReduceOp.SUM, [gradients[number] for number in dense], destinations=destinations)
        for number, total in zip(dense, sums, strict=True):
            reduced[number] = total
    return [sparse.sum_over_replicas(each, extended) if isinstance(each, IndexedSlices) else each for each in reduced]


def coalesced(gradients: list[Any]) -> list[Any]:
    """Return gradients with each row named once.  Local."""
    return [each.coalesced() if isinstance(each, IndexedSlices) else each for each in gradients]
