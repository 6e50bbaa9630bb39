"""What a distributed model cannot train with, refused before it trains; and losses whose reduction is a sum."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import keras

# Private: the mask that layers hand on with their outputs, and some losses with theirs
from keras.src.backend import get_keras_mask

from mpidist.frameworks.keras import backends
from mpidist.frameworks.keras.classes import is_of_keras
from mpidist.frameworks.keras.own_methods import put_over
from mpidist.frameworks.keras.replica import ModelReplica
from mpidist.frameworks.keras.row_values import by_number, require_row_values, require_row_weights

#: The reduction of losses that are given by name, or as functions.
_MEAN = "sum_over_batch_size"

#: What Keras computes as means over the last axis: of outputs of one axis, that of the rows.
_MEANS = (
    keras.losses.mean_squared_error,
    keras.losses.mean_absolute_error,
    keras.losses.mean_absolute_percentage_error,
    keras.losses.mean_squared_logarithmic_error,
    keras.losses.huber,
    keras.losses.log_cosh,
    keras.losses.hinge,
    keras.losses.squared_hinge,
    keras.losses.poisson,
    keras.losses.binary_crossentropy,
    keras.losses.binary_focal_crossentropy,
)


#: The version from which on Keras divides what an activity_regularizer adds up by the first axis of the outputs.
_DIVIDING_BY_ROWS = (3, 14)

#: What adds up over the elements of outputs.
_SUMS = (keras.regularizers.L1, keras.regularizers.L2, keras.regularizers.L1L2)

#: Layers of Keras that return what the user's own code does: the first axis need not be that of the rows.
_OF_ANY_OUTPUT = (keras.Model, keras.layers.Lambda, keras.layers.TorchModuleWrapper, keras.layers.JaxLayer)


def require_gradients(model: keras.Model) -> None:
    """Raise NotImplementedError if a variable is overwritten by what is no gradient.  Local."""
    for variable in model.trainable_variables:
        if getattr(variable, "overwrite_with_gradient", False):
            raise NotImplementedError(
                f"the variable {variable.path!r} is overwritten by its gradient, as those of float8 are: that is the "
                "greatest value of a batch, of which a replica has a part. Train with another dtype policy, "
                "such as mixed_bfloat16"
            )


def require_no_constraints(model: keras.Model) -> None:
    """Raise NotImplementedError if Keras would change a variable after each update of it.  Local."""
    for variable in model.trainable_variables:
        if getattr(variable, "constraint", None) is not None:
            raise NotImplementedError(
                f"the variable {variable.path!r} has a constraint, which optimizers of Keras impose after an update, "
                "and here an optimizer of mpidist updates. Make it without a constraint, or train with fit under a "
                "MultiWorkerMirroredStrategy"
            )


def require_no_mask(outputs: Any, who: str) -> None:
    """Raise NotImplementedError if a loss would divide by the places of its rows that are not masked.  Local."""
    if any(get_keras_mask(each) is not None for each in keras.tree.flatten(outputs)):
        raise NotImplementedError(
            f"{who}: the outputs of the Keras model have a mask, and its loss would divide by the "
            "places that are not masked on this replica. Let the model return outputs without a mask, and pass "
            "sample_weight with zeros for masked places"
        )


def losses_of_rows(losses: Iterable[Any], weights: Any, who: str) -> AbstractContextManager[None]:
    """Refuse losses that are no means over rows by what they return, for the time of a ``with`` block.  Local.

    NotImplementedError, when a loss is called: it has a mask, and would divide by the places that are not masked; or it
    is one number for all rows, and none that Keras computes as their mean without weights.  ValueError: its values,
    or the weights, are not those of rows.
    """
    return put_over((each, "call", _calling(each, weights, who)) for each in losses)


def _calling(loss: Any, weights: Any, who: str) -> Callable[[Any, Any], Any]:
    is_mean = getattr(loss, "fn", None) in _MEANS and weights is None

    def call(y_true: Any, y_pred: Any) -> Any:
        values = type(loss).call(loss, y_true, y_pred)
        if get_keras_mask(values) is not None:
            raise NotImplementedError(
                f"{who}: the loss {loss.name!r} has a mask, as with ignore_class, and would divide by the places that "
                "are not masked on this replica. Use a loss without one, and pass sample_weight with zeros for masked "
                "places"
            )
        if not (is_mean or keras.ops.shape(values)):
            raise NotImplementedError(
                f"{who}: the loss {loss.name!r} returned one number for all rows, of which a replica has a part. "
                "Return a loss for each row, as keras.ops.mean(keras.ops.square(labels - outputs), axis=-1) is; with "
                "Dice and Tversky name the axes within a row by axis"
            )
        if keras.ops.shape(values):
            function, called = functools.partial(type(loss).call, loss), f"{who}: the loss {loss.name!r}"
            require_row_values(loss, called, function, (y_true, y_pred), values, by_number)
            require_row_weights(called, values, weights)
        return values

    return call


def require_compiled_optimizer(model: Any, optimizer: Any) -> None:
    """Raise NotImplementedError if a step applies gradients by another optimizer than servers have.  Local."""
    if optimizer is not model.optimizer:
        raise NotImplementedError(
            f"train_step of {type(model).__name__} applies gradients by a {type(optimizer).__name__} that it was not "
            "compiled with, and servers update by the one that it was: call self.optimizer"
        )


def require_trainable(model: keras.Model) -> None:
    """Raise unless a model trains, on parts of batches, as it does on whole ones.  Local.

    NotImplementedError: it has losses that are no means over rows, or layers that compute with the rows of a whole
    batch.
    """
    backends.require_backend()
    if not getattr(model, "compiled", False):
        return  # Keras says so
    reductions = reductions_of(model)
    if "sum" in reductions and len(reductions) > 1:
        raise NotImplementedError(
            f"a distributed Keras model has losses with the reductions {', '.join(sorted(map(str, reductions)))}; use "
            'one for all, such as "sum_over_batch_size"'
        )
    require_gradients(model)
    require_layers_of_rows(model)


def require_layers_of_rows(model: keras.Model) -> None:
    """Raise NotImplementedError if a layer adds up over the rows of a batch, or keeps a state for each.  Local."""
    for layer in model._flatten_layers():
        if getattr(layer, "activity_regularizer", None) is not None and not _is_regularized_by_rows(layer):
            raise NotImplementedError(
                f"layer {layer.name!r} has an activity_regularizer that is not known to be a mean over the rows of a "
                'batch, of which a replica has a part: with "l1", "l2" and "l1l2" those of Keras\' own layers are from '
                "Keras 3.14 on, but for Lambda and models. Call add_loss in the layer with a mean over rows"
            )
        if getattr(layer, "stateful", False):
            raise NotImplementedError(
                f"layer {layer.name!r} is stateful: it keeps a state for each row of a batch, of which a distributed "
                "Keras model has a part on each replica. Make it with stateful=False"
            )


def _is_regularized_by_rows(layer: Any) -> bool:
    """Return whether what a layer's outputs add to the loss is known to be a mean over rows.  Local."""
    return (
        backends.version() >= _DIVIDING_BY_ROWS
        and type(layer.activity_regularizer) in _SUMS
        and is_of_keras(type(layer))
        and not isinstance(layer, _OF_ANY_OUTPUT)
    )


def reductions_of(model: Any) -> set[str]:
    """Return the reductions of a model's losses; names and functions become losses that are means.  Local."""
    losses = [loss for loss in keras.tree.flatten(model.loss) if loss is not None]
    return {getattr(loss, "reduction", None) or _MEAN for loss in losses}


def loss_arguments(
    model: Any, replica: ModelReplica, compute_loss: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the arguments of `compute_loss`, by name, by which the mean over replicas is that of the batch.  Local.

    NotImplementedError: the loss divides by what the rows have, not by their number.
    """
    arguments = dict(inspect.signature(compute_loss).bind(*args, **kwargs).arguments)
    predictions = keras.tree.flatten(arguments.get("y_pred"))
    weights = arguments.get("sample_weight")
    require_no_mask(predictions, replica.name)
    reductions = reductions_of(model)
    if weights is not None and "mean_with_sample_weight" in reductions:
        raise NotImplementedError(
            f'{replica.name}: a loss with reduction "mean_with_sample_weight" divides by the weights of this '
            'replica\'s rows; use "sum_over_batch_size", which divides by their number'
        )
    if reductions == {"sum"}:
        factor = replica.factor
        of_all = keras.ops.convert_to_tensor(factor)
        times = keras.tree.map_structure(lambda each: of_all if each is None else _wide(each) * factor, weights)
        arguments["sample_weight"] = times
    return arguments


def _wide(weights: Any) -> Any:
    """Return weights of 16 bits, in which a product would be rounded, and integers as float32.  Local."""
    weights = keras.ops.convert_to_tensor(weights)  # on PyTorch Keras leaves arrays of bfloat16 as they are
    is_double = keras.backend.standardize_dtype(weights.dtype) == "float64"
    return weights if is_double else keras.ops.cast(weights, "float32")
