"""What is put over the methods of a Keras optimizer: gradients are reduced over the replicas, and then applied.

An optimizer may have others inside of it, such as a `LossScaleOptimizer`.  Only the outermost one reduces, and for the
model whose step is under way, whichever of them was distributed, and where.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import keras

from mpidist import context
from mpidist.frameworks.keras import backends
from mpidist.frameworks.keras.classes import distribute, replica_of, stock
from mpidist.frameworks.keras.current_step import in_optimizer, is_in_optimizer, stepping
from mpidist.frameworks.keras.float_range import overflown
from mpidist.frameworks.keras.replica import ModelReplica


def distribute_optimizer(optimizer: keras.optimizers.Optimizer, replica: ModelReplica) -> None:
    """Let an optimizer reduce the gradients that it is given.  Local."""
    distribute(optimizer, _METHODS, replica)


def _outermost(optimizer: Any) -> ModelReplica | None:
    """Return the replica for which an optimizer reduces; None where nothing is left to be done."""
    own, model = replica_of(optimizer), stepping()
    if own is None or is_in_optimizer():
        return None
    return model if model is not None and model.strategy is own.strategy else own


def _apply(self: Any, grads: Sequence[Any], trainable_variables: Any = None) -> None:
    replica = _outermost(self)
    if replica is None or not len(grads):
        return stock(self).apply(grads, trainable_variables)
    if replica.collected is not None:  # servers apply them
        known = self._trainable_variables if trainable_variables is None else list(trainable_variables)
        replica.collected.append((self, list(grads), known))
        # Private: the step may look at them
        self._iterations.assign_add(1)
        return None
    if replica.share is None:
        _require_replica(replica)
    grads = backends.seam().reduced(replica, list(grads), id(self) in replica.weighted)
    if replica.halves:
        known = self._trainable_variables if trainable_variables is None else list(trainable_variables)
        grads = overflown(grads, known, replica.halves)
    with in_optimizer():
        return stock(self).apply(grads, trainable_variables)


def _stateless_apply(
    self: Any, optimizer_variables: Sequence[Any], grads: Sequence[Any], trainable_variables: Sequence[Any]
) -> Any:
    replica = _outermost(self)
    if replica is None:
        return stock(self).stateless_apply(optimizer_variables, grads, trainable_variables)
    if replica.collected is not None:
        return backends.seam().collect(replica, self, optimizer_variables, grads, trainable_variables)
    _require_replica(replica)
    grads = backends.seam().reduced(replica, list(grads), False)
    with in_optimizer():
        return stock(self).stateless_apply(optimizer_variables, grads, trainable_variables)


def _scale_loss(self: Any, loss: Any) -> Any:
    """Weight a loss that is scaled: what overflows in 16 bits, and what underflows, is what does in one process."""
    replica = _outermost(self)
    if replica is None or replica.share is None:
        return stock(self).scale_loss(loss)
    with in_optimizer():
        scaled = stock(self).scale_loss(loss)
    if scaled is loss:
        return loss
    replica.weighted.add(id(self))
    return scaled * replica.weight


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


_METHODS = {"apply": _apply, "stateless_apply": _stateless_apply, "scale_loss": _scale_loss}
