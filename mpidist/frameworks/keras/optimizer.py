"""What is put over the methods of a Keras optimizer: gradients are reduced over the replicas, and then applied.

An optimizer may have others inside of it, such as a `LossScaleOptimizer`.  Only the outermost one reduces, and for the
model whose step is under way, whichever of them was distributed, and where.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy

from mpidist.errors import CollectiveMismatchError
from mpidist.frameworks.keras import backends, facts
from mpidist.frameworks.keras.backends import to_numpy
from mpidist.frameworks.keras.classes import distribute, replica_of, stock
from mpidist.frameworks.keras.current_step import current_step, in_optimizer
from mpidist.frameworks.keras.float_range import overflown
from mpidist.frameworks.keras.replica import ModelReplica
from mpidist.frameworks.keras.variables import learning_rates


def distribute_optimizer(optimizer: keras.optimizers.Optimizer, replica: ModelReplica) -> None:
    """Let an optimizer reduce the gradients that it is given.  Local."""
    distribute(optimizer, _METHODS, replica)


def _outermost(optimizer: Any) -> ModelReplica | None:
    """Return the replica for which an optimizer reduces; None where nothing is left to be done."""
    own, model = replica_of(optimizer), current_step.replica
    if own is None or current_step.is_in_optimizer:
        return None
    return model if model is not None and model.strategy is own.strategy else own


def _apply(self: Any, grads: Sequence[Any], trainable_variables: Any = None) -> None:
    replica = _outermost(self)
    if replica is None or not len(grads):
        return stock(self).apply(grads, trainable_variables)
    variables = None if trainable_variables is None else list(trainable_variables)
    known = self._trainable_variables if variables is None else variables
    if replica.collected is not None:  # servers apply them
        replica.collected.append((self, list(grads), known))
        # Private: the step may look at them
        self._iterations.assign_add(1)
        return None
    is_due = False
    if replica.share is None:
        grads = _reduced_alone(self, replica, grads, self.variables)
        is_due = replica.is_due(self)
    else:
        grads = backends.seam().reduced(replica, list(grads), id(self) in replica.weighted)
    if replica.halves:
        grads = overflown(grads, known, replica.halves)
    with in_optimizer():
        applied = stock(self).apply(grads, variables)
    if is_due:
        _compare(self, replica, known, self.variables)
    return applied


def _stateless_apply(
    self: Any, optimizer_variables: Sequence[Any], grads: Sequence[Any], trainable_variables: Sequence[Any]
) -> Any:
    replica = _outermost(self)
    if replica is None:
        return stock(self).stateless_apply(optimizer_variables, grads, trainable_variables)
    if replica.collected is not None:
        return backends.seam().collect(replica, self, optimizer_variables, grads, trainable_variables)
    grads = _reduced_alone(self, replica, grads, optimizer_variables)
    is_due = replica.is_due(self)
    with in_optimizer():
        found = stock(self).stateless_apply(optimizer_variables, grads, trainable_variables)
    if is_due:
        _compare(self, replica, *found)
    return found


def _reduced_alone(self: Any, replica: ModelReplica, grads: Sequence[Any], values: Sequence[Any]) -> list[Any]:
    """Return gradients summed in a loop of the user's own; learning rates go with them, a place for each replica.

    `values`: of the optimizer's variables.  RuntimeError: it is not called in a replica.  CollectiveMismatchError, on
    all ranks: learning rates differ.
    """
    if not replica.is_in_force:
        raise RuntimeError(
            f"{replica.name}: gradients are applied by an optimizer of {replica.strategy!r}, which sums them over all "
            "replicas, and that is done in a replica: call the training step by strategy.run(step, args=...). A model "
            "is trained by its fit, if it is made in the scope too, or given to strategy.distribute"
        )
    is_own = numpy.arange(replica.count) == replica.number
    rates = [keras.ops.convert_to_tensor(each) for each in learning_rates(self, values)]
    rates = [keras.ops.where(is_own, each, 0.0) for each in rates]
    totals = backends.seam().reduced(replica, [*grads, *rates], False)
    for total in totals[len(grads) :]:
        by_rank = numpy.asarray(to_numpy(total), "float32")
        differing = numpy.flatnonzero(~numpy.isclose(by_rank, by_rank[0], 0, 0, equal_nan=True))
        if len(differing):
            raise CollectiveMismatchError(
                f"{replica.name}: the learning rate of an optimizer of Keras, {type(self).__name__}, is "
                f"{by_rank[differing[0]]} on rank {differing[0]}, expected {by_rank[0]}, as on rank 0: set it on every "
                "rank"
            )
    return totals[: len(grads)]


def _compare(self: Any, replica: ModelReplica, weights: Sequence[Any], values: Sequence[Any]) -> None:
    """Compare what an optimizer has updated, and its own variables.  Collective.

    CollectiveMismatchError, on all ranks: they differ.
    """
    named = [("of a weight", each) for each in weights]
    named += [(variable.name, value) for variable, value in zip(self.variables, values, strict=True)]
    facts.compare_weights(replica, named, "weights that an optimizer of Keras has updated")


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


_METHODS = {"apply": _apply, "stateless_apply": _stateless_apply, "scale_loss": _scale_loss}
