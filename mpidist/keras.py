"""Keras 3 models train on MPI ranks, with the backends JAX and PyTorch."""

from typing import Any

from mpidist.data import Dataset
from mpidist.errors import MissingDependencyError
from mpidist.hints import public_module
from mpidist.packages import pip_install
from mpidist.strategies.multi_worker_mirrored import MultiWorkerMirroredStrategy

try:
    import keras as _keras
except ImportError as error:
    raise MissingDependencyError(
        f"mpidist.keras needs Keras 3, and JAX or PyTorch: {pip_install('keras', 'jax')} ({error})"
    ) from error

from mpidist.frameworks.keras.distribution import distribute as _distribute
from mpidist.frameworks.keras.inputs import DatasetInput as _DatasetInput

del _keras

__all__ = ["as_input", "distribute"]


def as_input(dataset: Dataset) -> Any:
    """Return a data set as an input of any Keras model, for `fit`, `evaluate`, `predict` and validation.  Local.

    A distributed model takes the data set itself too.  A strategy of one rank leaves a model as Keras made it, which
    does not know data sets of mpidist: a script for any number of ranks calls this.

    Parameters
    ----------
    dataset : Dataset
        Batched by the global batch; its elements are inputs, or tuples of inputs, labels and weights.  Each pass is its
        next epoch.  `class_weight` is not for it: give weights.

    Raises
    ------
    TypeError
        It is something else; a distributed data set has one replica's rows only.
    ValueError
        It has no batches.
    """
    return _DatasetInput(dataset)


def distribute(obj: Any, strategy: Any = None) -> Any:
    """Let a Keras model, or an optimizer, train over all replicas of a strategy; the object itself is returned.

    Collective: every rank calls it in the same order.

    Parameters
    ----------
    obj : keras.Model or keras.optimizers.Optimizer
        A model may be compiled already.  An optimizer sums the gradients of a training loop of one's own, inside of
        ``strategy.run``.
    strategy : Strategy, optional
        A MultiWorkerMirroredStrategy of all ranks by default.

    Raises
    ------
    TypeError
        It is something else.
    NotImplementedError
        With this backend or version of Keras, or this strategy.
    RuntimeError
        It is distributed already, by another strategy.
    """
    return _distribute(MultiWorkerMirroredStrategy() if strategy is None else strategy, [obj])[0]


public_module(__name__)
