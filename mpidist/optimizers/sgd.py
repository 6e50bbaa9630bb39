"""Stochastic gradient descent, with momentum if asked."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpidist.optimizers.base import LearningRate, Optimizer, OptimizerOptions
from mpidist.optimizers.rules.sgd import SGDRule

if TYPE_CHECKING:
    from typing_extensions import Unpack


class SGD(SGDRule, Optimizer):
    """Gradient descent: ``p -= learning_rate * g``.

    With momentum: ``velocity = momentum * velocity - learning_rate * g``, then ``p += velocity``; or, with
    `nesterov`, ``p += momentum * velocity - learning_rate * g``.

    Parameters
    ----------
    learning_rate : float or callable
        See `Optimizer`.
    momentum : float
        From 0 to 1.
    nesterov : bool
    **options
        See `Optimizer`.
    """

    def __init__(
        self,
        learning_rate: LearningRate = 0.01,
        momentum: float = 0.0,
        nesterov: bool = False,
        **options: Unpack[OptimizerOptions],
    ) -> None:
        if not 0 <= momentum <= 1:
            raise ValueError(f"momentum must be from 0 to 1, got {momentum}")
        self.momentum = momentum
        self.nesterov = nesterov
        self.slot_names = ("momentum",) if momentum else ()
        self.zero_gradient_changes_nothing = not momentum
        super().__init__(learning_rate, **options)
