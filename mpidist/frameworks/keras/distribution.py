"""The adapter of Keras: what `Strategy.distribute`, and the scope of a strategy, do with models and optimizers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from mpidist.collectives.mismatch import fact
from mpidist.frameworks.keras.backends import require_backend
from mpidist.frameworks.keras.classes import replica_of
from mpidist.frameworks.keras.model import begin, distribute_model
from mpidist.frameworks.keras.optimizer import distribute_optimizer
from mpidist.frameworks.keras.own_device import use_gpu
from mpidist.frameworks.keras.replica import ModelReplica
from mpidist.frameworks.keras.served_model import begin_served, serve_model
from mpidist.frameworks.keras.served_replica import ServedReplica
from mpidist.strategies.mirrored_extended import MirroredExtended
from mpidist.strategies.parameter_server_extended import ServedExtended


def distribute(strategy: Any, objects: Sequence[Any]) -> list[Any]:
    """Let Keras models and optimizers train over all replicas of a strategy; the objects themselves are returned.

    Collective: models that have weights get those of rank 0.  A strategy of one replica leaves them as they are.

    Parameters
    ----------
    strategy : Strategy
    objects : sequence of keras.Model or keras.optimizers.Optimizer
        An optimizer sums gradients over the replicas; a model weights them by rows, and takes care of the optimizer
        that it is compiled with.

    Raises
    ------
    TypeError
        Something else.
    NotImplementedError
        With this backend or version of Keras, or this strategy.
    RuntimeError
        It is distributed already, by another strategy.
    """
    for obj in objects:
        if not isinstance(obj, (keras.Model, keras.optimizers.Optimizer)):
            raise TypeError(
                f"distribute() takes models and optimizers of Keras, got a {type(obj).__name__}; a layer is "
                "distributed with the model that it is in"
            )
    require_strategy(strategy)
    require_backend()
    if strategy.extended.spans_ranks or isinstance(strategy.extended, ServedExtended):
        use_gpu(strategy)
        for obj in objects:
            _distribute(obj, strategy)
        models = [obj for obj in objects if isinstance(obj, keras.Model)]
        begin_served(models) if isinstance(strategy.extended, ServedExtended) else begin(models)
    return list(objects)


def attach(strategy: Any, obj: Any) -> None:
    """Let a model or an optimizer that is made just now train over all replicas of a strategy.  Local."""
    require_strategy(strategy)
    require_backend()
    _distribute(obj, strategy)


def begin_attached(strategy: Any, objects: Sequence[Any]) -> None:
    """Give the models among objects that were made in a scope the weights of rank 0.

    Collective: every rank calls it in the same order.

    CollectiveMismatchError, on all ranks: they have made different models.
    """
    models = [obj for obj in objects if isinstance(obj, keras.Model) and replica_of(obj) is not None]
    if not models:
        return
    if isinstance(strategy.extended, ServedExtended):
        begin_served(models)
        return
    facts = [fact(f"model {place}", type(model).__name__) for place, model in enumerate(models)]
    ModelReplica(strategy).replicas.check("the end of a scope in which Keras models were made", facts)
    begin(models)


def _distribute(obj: Any, strategy: Any) -> None:
    before = replica_of(obj)
    if before is not None and before.strategy is not strategy:
        raise RuntimeError(f"{obj!r} is distributed by {before.strategy!r}, and cannot be by {strategy!r} too")
    if before is not None:
        return
    is_model, is_served = isinstance(obj, keras.Model), isinstance(strategy.extended, ServedExtended)
    if is_model and is_served:
        serve_model(obj, strategy)
    elif is_model:
        distribute_model(obj, ModelReplica(strategy))
    else:
        distribute_optimizer(obj, ServedReplica(strategy) if is_served else ModelReplica(strategy))


def require_strategy(strategy: Any) -> None:
    """Raise NotImplementedError unless Keras models are distributed by such a strategy.  Local."""
    extended, name = strategy.extended, type(strategy).__name__
    if isinstance(extended, ServedExtended):
        if extended.num_replicas > 1:
            raise NotImplementedError(
                f"{name} has workers of {extended.num_replicas} ranks, and a Keras model takes a worker of one: leave "
                "ranks_per_worker out"
            )
        return
    if extended.num_logical_devices > 1:
        raise NotImplementedError(
            f"a replica of {name} is {extended.num_logical_devices} ranks, and a Keras model is not split over ranks; "
            "make the strategy with one rank in a replica, or use MultiWorkerMirroredStrategy"
        )
    if extended.spans_ranks and not isinstance(extended, MirroredExtended):
        raise NotImplementedError(f"a Keras model is not distributed by {name}; use MultiWorkerMirroredStrategy")
