"""What is put over the methods of a Keras model, so that it trains over all replicas of a strategy."""

from __future__ import annotations

import inspect
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import keras
import numpy

# Private: how Keras finds what a model returns, and builds it, without values; whether it does so just now
from keras.src.backend import compute_output_spec, in_stateless_scope

from mpidist.collectives.mismatch import fact
from mpidist.frameworks.keras import backends, checks, facts, metrics
from mpidist.frameworks.keras.callbacks import with_agreement
from mpidist.frameworks.keras.classes import distribute, replica_of, stock, stock_class, stock_classes
from mpidist.frameworks.keras.current_step import current_step
from mpidist.frameworks.keras.given import adapter_of, on_host, split, three
from mpidist.frameworks.keras.inputs import cut, rows_of
from mpidist.frameworks.keras.optimizer import distribute_optimizer
from mpidist.frameworks.keras.random_numbers import own_random_numbers
from mpidist.frameworks.keras.replica import ModelReplica
from mpidist.frameworks.keras.shares import BatchShare
from mpidist.frameworks.keras.variables import optimizers_of, share_weights, state_of
from mpidist.training.predictions import input_order


def distribute_model(model: keras.Model, replica: ModelReplica) -> None:
    """Let a model train over all replicas; also one whose constructor has not run yet.  Local."""
    distribute(model, _METHODS, replica)
    for name in ("train_function", "test_function", "predict_function"):
        if name in vars(model):  # made of the steps of one rank
            setattr(model, name, None)
    link_optimizers(model)


def link_optimizers(model: Any) -> None:
    """Distribute the optimizers that a distributed model has.  Local."""
    for each in optimizers_of(model):
        distribute_optimizer(each, replica_of(model))


def _compile(self: Any, *args: Any, **kwargs: Any) -> None:
    stock(self).compile(*args, **kwargs)
    _count_compilation(self)


def _compile_from_config(self: Any, config: Any) -> None:
    with stock_class(self):  # Keras leaves a model alone whose class has a `compile` of its own
        self.compile_from_config(config)
    _count_compilation(self)


def _count_compilation(model: Any) -> None:
    replica = replica_of(model)
    if replica is not None:
        replica.compilations += 1
        link_optimizers(model)


def _get_compile_config(self: Any) -> Any:
    with stock_classes():
        return self.get_compile_config()


# -- training, evaluation, prediction ---------------------------------------------------------------------------------


def _fit(self: Any, *args: Any, **kwargs: Any) -> Any:
    replica = replica_of(self)
    if replica is None:
        return stock(self).fit(*args, **kwargs)
    bound = inspect.signature(stock(self).fit).bind(*args, **kwargs)
    bound.apply_defaults()
    return replica.run(lambda: stock(self).fit(**_fit_arguments(self, replica, bound.arguments)))


def _fit_arguments(model: Any, replica: ModelReplica, options: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of the stock `fit` for this replica.  Collective."""
    checks.require_trainable(model)
    settings = ("epochs", "initial_epoch", "steps_per_epoch", "validation_steps", "validation_freq", "validation_split")
    replica.replicas.check("fit of a Keras model", [fact(name, options.get(name)) for name in settings])
    arrays = options.pop("x"), options.pop("y"), options.pop("sample_weight")
    other, fraction = options["validation_data"], options.pop("validation_split")
    size, validation_size = options.pop("batch_size"), options.pop("validation_batch_size")
    if fraction and other is None:
        arrays, other = split(arrays, fraction)
    steps, shuffle, class_weight = options["steps_per_epoch"], options.pop("shuffle"), options.pop("class_weight")
    data = adapter_of(replica, "fit", arrays, size, steps, shuffle, class_weight)
    if other is not None:
        steps = options["validation_steps"]
        other = adapter_of(replica, "validation_data", three(other), validation_size or size, steps)
    return {
        **options,
        "x": data,
        "validation_data": other,
        "shuffle": False,
        "callbacks": with_agreement(replica, options["callbacks"]),
        "verbose": options["verbose"] if replica.is_chief else 0,
    }


def _evaluate(
    self: Any,
    x: Any = None,
    y: Any = None,
    batch_size: int | None = None,
    verbose: Any = "auto",
    sample_weight: Any = None,
    steps: int | None = None,
    callbacks: Any = None,
    return_dict: bool = False,
    **kwargs: Any,
) -> Any:
    replica = replica_of(self)
    arrays = x, y, sample_weight
    options = {"verbose": verbose, "steps": steps, "callbacks": callbacks, **kwargs}
    if replica is None:
        return stock(self).evaluate(x, y, batch_size, sample_weight=sample_weight, return_dict=return_dict, **options)

    def run() -> Any:
        if not kwargs:  # else it is the validation of `fit`, which has sorted everything out
            checks.require_trainable(self)
            options["callbacks"] = with_agreement(replica, callbacks)
            options["verbose"] = verbose if replica.is_chief else 0
        data = adapter_of(replica, "evaluate", arrays, batch_size, steps)
        of_fit = replica.last_results, replica.last_share
        results = stock(self).evaluate(x=data, return_dict=True, **options)
        last = replica.last_share  # whose numbers Keras returns, beside the results of metrics
        results = metrics.agreed(replica, results, 0 if last is None else last.own_rows)
        replica.last_results, replica.last_share = of_fit
        # Private: the order of metrics
        return results if return_dict else self._flatten_metrics_in_order(results)

    return replica.run(run)


def _predict(
    self: Any,
    x: Any,
    batch_size: int | None = None,
    verbose: Any = "auto",
    steps: int | None = None,
    callbacks: Any = None,
) -> Any:
    replica = replica_of(self)
    if replica is None:
        return stock(self).predict(x, batch_size, verbose, steps, callbacks)

    def run() -> Any:
        data = adapter_of(replica, "predict", (x, None, None), batch_size, steps)
        shown = verbose if replica.is_chief else 0
        found = stock(self).predict(x=data, verbose=shown, steps=steps, callbacks=with_agreement(replica, callbacks))
        return _gathered(replica, found, data.handed_out)

    return replica.run(run)


def _gathered(replica: ModelReplica, predictions: Any, shares: Sequence[BatchShare]) -> Any:
    """Return the predictions for all rows, of those for this replica's rows batch by batch.  Collective."""
    rows = sum(share.given_rows for share in shares)
    counts = numpy.concatenate([numpy.full(share.given_rows, share.own_rows > 0) for share in shares])
    parts = [[BatchShare.of(share.rows, n, replica.count).own_rows for share in shares] for n in range(replica.count)]
    order = input_order(parts)

    def joined(leaf: Any) -> numpy.ndarray:
        array = numpy.asarray(leaf)
        if len(array) != rows:
            raise ValueError(
                f"{replica.name}: the model made {len(array)} predictions of {rows} rows; a distributed model must "
                "make one for each row"
            )
        return replica.communicator.all_gather(numpy.ascontiguousarray(array[counts]), axis=0)[order]

    return keras.tree.map_structure(joined, predictions)


# -- one batch --------------------------------------------------------------------------------------------------------


def _train_on_batch(
    self: Any, x: Any, y: Any = None, sample_weight: Any = None, class_weight: Any = None, return_dict: bool = False
) -> Any:
    given = {"class_weight": class_weight, "return_dict": return_dict}
    return _on_batch(self, stock(self).train_on_batch, (x, y, sample_weight), given)


def _test_on_batch(self: Any, x: Any, y: Any = None, sample_weight: Any = None, return_dict: bool = False) -> Any:
    return _on_batch(self, stock(self).test_on_batch, (x, y, sample_weight), {"return_dict": return_dict})


def _on_batch(model: Any, method: Callable[..., Any], arrays: tuple[Any, Any, Any], options: dict[str, Any]) -> Any:
    """Call a method with this replica's rows of a global batch; it returns loss and metrics of the whole batch."""
    replica = replica_of(model)
    if replica is None:
        return method(*arrays, **options)

    def run() -> Any:
        checks.require_trainable(model)
        x, y, sample_weight = map(on_host, arrays)
        what, is_training = f"{method.__name__} of a Keras model", method.__name__ == "train_on_batch"
        facts.compare_arrays(replica, what, (x, y, sample_weight), facts.rates(model) if is_training else {})
        is_due = is_training and replica.is_due(model)  # counted where no rank has failed yet
        share = BatchShare.of(rows_of((x, y, sample_weight)), replica.number, replica.count)
        replica.shares.clear()
        replica.shares.append(share)
        replica.is_for_one_batch = True
        try:
            results = method(*(cut(each, share) for each in (x, y, sample_weight)), **options)
        finally:
            replica.is_for_one_batch = False
        if is_due:
            facts.compare_weights(replica, state_of(model), f"weights after {what}")
        return results

    return replica.run(run)


# -- a model that is called -------------------------------------------------------------------------------------------


def begin(models: Sequence[Any]) -> None:
    """Give models that have weights the chief's.

    Collective: every rank calls it in the same order, with the same models.
    """
    for model in reversed(models):  # those that contain others come later
        replica = replica_of(model)
        if not replica.has_chiefs_weights and getattr(model, "built", False):
            facts.compare_models(replica, model, "a Keras model that is made in a scope, or given to distribute")
            share_weights(replica, model, model.variables)


def _call(self: Any, *args: Any, **kwargs: Any) -> Any:
    replica = replica_of(self)
    is_by_itself = replica is not None and _is_by_itself(replica, (args, kwargs))
    if is_by_itself and not replica.has_chiefs_weights:
        if not self.built:
            compute_output_spec(stock(self).__call__, *args, **kwargs)
        facts.compare_models(replica, self, "the first call of a Keras model, which takes the weights of rank 0")
        share_weights(replica, self, self.variables)
    with own_random_numbers(replica.number) if is_by_itself and replica.is_in_force else nullcontext():
        return stock(self).__call__(*args, **kwargs)


def _is_by_itself(replica: ModelReplica, given: Any) -> bool:
    """Return whether a model is called with values, and neither trained, nor traced, nor put into another one."""
    if replica.is_running or current_step.replica is not None or in_stateless_scope():
        return False
    is_concrete = backends.seam().is_concrete
    leaves = keras.tree.flatten(given)
    return not any(
        isinstance(leaf, keras.KerasTensor) or (keras.ops.is_tensor(leaf) and not is_concrete(leaf)) for leaf in leaves
    )


def _predict_on_batch(self: Any, x: Any) -> Any:
    replica = replica_of(self)
    if replica is not None and not replica.has_chiefs_weights and not replica.is_running:
        self(x)
    return stock(self).predict_on_batch(x)


# -- what a step asks for ---------------------------------------------------------------------------------------------


def compute_loss(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Return the loss of this replica's rows, of which the mean over replicas is that of the batch.  Local."""
    replica = replica_of(self)
    below = stock(self).compute_loss
    if replica is None or replica.share is None:
        return below(*args, **kwargs)
    arguments = checks.loss_arguments(self, replica, below, args, kwargs)
    # Private: what compile was given, and the losses of all outputs, once the model is built
    losses = [each.loss for each in getattr(self._compile_loss, "_flat_losses", None) or ()]
    with checks.losses_of_rows(losses, arguments.get("sample_weight"), replica.name):
        return below(**arguments)


def _get_metrics_result(self: Any) -> Any:
    replica = replica_of(self)
    variables = self.metrics_variables if replica is not None else []
    values = [variable.value for variable in variables]
    is_concrete = backends.seam().is_concrete
    # Keras also asks for results while it traces shapes: what is computed then has no value
    if not values or replica.share is not None or not all(map(is_concrete, [keras.ops.zeros(()), *values])):
        return stock(self).get_metrics_result()
    return metrics.results(replica, variables, values, stock(self).get_metrics_result)


def _reset_metrics(self: Any) -> None:
    stock(self).reset_metrics()
    replica = replica_of(self)
    if replica is not None:
        metrics.require_zeros(self, replica.count)


def _is_stopped(self: Any) -> bool:
    replica = replica_of(self)
    return replica.is_stopped if replica is not None and replica.is_running else vars(self).get("stop_training", False)


def _vote(self: Any, value: bool) -> None:
    replica = replica_of(self)
    vars(self)["stop_training"] = value
    if replica is not None:
        replica.is_vote = bool(value)
        replica.is_stopped = replica.is_stopped and bool(value)


# -- files ------------------------------------------------------------------------------------------------------------


def _changing(name: str) -> Callable[..., Any]:
    """Return a method of a name that changes weights, so that they are the chief's no more."""

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if replica_of(self) is not None:
            replica_of(self).is_synchronized = False
        return getattr(stock(self), name)(*args, **kwargs)

    return method


def _reduce(self: Any) -> Any:
    with stock_classes():
        return self.__reduce__()


def _saving(name: str) -> Callable[..., Any]:
    """Return a method of a name that saves as the classes of the user's.

    A file is complete at once, since several ranks may write the same one.
    """

    def method(self: Any, filepath: Any, *args: Any, **kwargs: Any) -> Any:
        save, path = getattr(stock(self), name), Path(filepath)
        if not isinstance(filepath, (str, os.PathLike)) or not path.parent.is_dir():
            with stock_classes():
                return save(filepath, *args, **kwargs)
        with stock_classes(), _replaced(path, kwargs.get("overwrite", args[0] if args else True)) as temporary:
            return save(temporary, *args, **kwargs)

    return method


@contextmanager
def _replaced(path: Path, overwrite: bool) -> Iterator[Path]:
    if path.exists() and not overwrite:
        yield path  # Keras asks
        return
    # a folder has one maker, where in containers several processes have one number; Keras asks for the name's ending
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as folder:
        yield Path(folder, path.name)
        for entry in sorted(Path(folder).rglob("*"), key=lambda each: each.suffix == ".json"):  # which names the others
            place = path.parent / entry.relative_to(folder)
            if entry.is_dir():  # of a model that is not zipped
                place.mkdir(exist_ok=True)
            else:
                os.replace(entry, place)


def _of_backend(name: str, function: str) -> Callable[..., Any]:
    """Return a method of a name that calls a function of the seam of the backend."""

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        replica = replica_of(self)
        if replica is None:
            return getattr(stock(self), name)(*args, **kwargs)
        return getattr(backends.seam(), function)(self, replica, name, *args, **kwargs)

    return method


#: What compiles and saves a model as one of the user's own class.
SAVING: dict[str, Any] = {
    "compile": _compile,
    "compile_from_config": _compile_from_config,
    "get_compile_config": _get_compile_config,
    "__reduce__": _reduce,
    **{name: _saving(name) for name in ("save", "save_weights")},
}

_MAKERS = ("make_train_function", "make_test_function", "make_predict_function")

_METHODS: dict[str, Any] = {
    **SAVING,
    **{name: _of_backend(name, "make_function") for name in _MAKERS},
    **{name: _of_backend(name, "step") for name in ("train_step", "test_step", "predict_step")},
    "fit": _fit,
    "evaluate": _evaluate,
    "predict": _predict,
    "train_on_batch": _train_on_batch,
    "test_on_batch": _test_on_batch,
    "__call__": _call,
    "predict_on_batch": _predict_on_batch,
    "compute_loss": compute_loss,
    "get_metrics_result": _get_metrics_result,
    "reset_metrics": _reset_metrics,
    "stop_training": property(_is_stopped, _vote),
    **{name: _changing(name) for name in ("load_weights", "set_weights")},
}
