"""What is put over the methods of a Keras optimizer: gradients are reduced over the replicas, and then applied."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import keras

from mpidist import context
from mpidist.frameworks.keras import backends
from mpidist.frameworks.keras.classes import distribute, replica_of, stock
from mpidist.frameworks.keras.replica import ModelReplica


def distribute_optimizer(optimizer: keras.optimizers.Optimizer, replica: ModelReplica) -> None:
    """Let an optimizer reduce the gradients that it is given.  Local."""
    distribute(optimizer, _METHODS, replica)


def _apply(self: Any, grads: Sequence[Any], trainable_variables: Any = None) -> None:
    replica = replica_of(self)
    if replica is None or replica.is_applying or not len(grads):
        return stock(self).apply(grads, trainable_variables)
    if replica.share is None:
        _require_replica(replica)
    grads = backends.seam().reduced(replica, list(grads))
    with _applying(replica):
        return stock(self).apply(grads, trainable_variables)


def _stateless_apply(
    self: Any, optimizer_variables: Sequence[Any], grads: Sequence[Any], trainable_variables: Sequence[Any]
) -> Any:
    replica = replica_of(self)
    if replica is None or replica.is_applying:
        return stock(self).stateless_apply(optimizer_variables, grads, trainable_variables)
    if replica.collected is not None:
        return backends.seam().collect(replica, self, optimizer_variables, grads, trainable_variables)
    _require_replica(replica)
    grads = backends.seam().reduced(replica, list(grads))
    with _applying(replica):
        return stock(self).stateless_apply(optimizer_variables, grads, trainable_variables)


@contextmanager
def _applying(replica: ModelReplica) -> Any:
    """Let optimizers inside of this one apply what they get: it is reduced already."""
    replica.is_applying = True
    try:
        yield
    finally:
        replica.is_applying = False


def _require_replica(replica: ModelReplica) -> None:
    """Raise RuntimeError outside of `strategy.run`, where it is not known whether all ranks apply gradients."""
    present = context.get_replica_context()
    if present is None or present.strategy is not replica.strategy:
        _refuse(replica)


def _refuse(replica: ModelReplica) -> NoReturn:
    raise RuntimeError(
        f"{replica.name}: gradients are applied by an optimizer of {replica.strategy!r}, which sums them over all "
        "replicas, and that is done in a replica: call the training step by strategy.run(step, args=...). A model is "
        "trained by its fit, if it is made in the scope too, or given to strategy.distribute"
    )


_METHODS = {"apply": _apply, "stateless_apply": _stateless_apply}
