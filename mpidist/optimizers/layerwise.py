"""LARS and LAMB: steps scaled to the norm of each variable, for training with very large batches."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

from mpidist.optimizers.base import LearningRate, Optimizer, OptimizerOptions, OptionsButDecay
from mpidist.optimizers.rules.layerwise import LAMBRule, LARSRule, LayerwiseRule

if TYPE_CHECKING:
    from typing_extensions import Unpack


class LayerwiseOptimizer(LayerwiseRule, Optimizer):
    """Base of LARS and LAMB.

    Parameters
    ----------
    learning_rate : float or callable
        See `Optimizer`.
    exclude_from_layer_adaptation : iterable of str
        Regular expressions; variables with a name in which one is found are updated with a ratio of 1.
    **options
        See `Optimizer`.
    """

    def __init__(
        self,
        learning_rate: LearningRate,
        exclude_from_layer_adaptation: Iterable[str] = (),
        **options: Unpack[OptimizerOptions],
    ) -> None:
        self.not_adapted = [re.compile(pattern) for pattern in exclude_from_layer_adaptation]
        super().__init__(learning_rate, **options)


class LARS(LARSRule, LayerwiseOptimizer):
    """Momentum with a learning rate for each variable (You, Gitman and Ginsburg, 2017, arXiv:1708.03888, algorithm 1).

    ``ratio = trust_coefficient * norm(p) / (norm(g) + weight_decay * norm(p))``, then
    ``velocity = momentum * velocity + learning_rate * ratio * (g + weight_decay * p)`` and ``p -= velocity``.

    Parameters
    ----------
    learning_rate : float or callable
        See `Optimizer`.
    momentum : float
        From 0 to 1.
    trust_coefficient : float
    weight_decay : float
    exclude_from_layer_adaptation : iterable of str
        See `LayerwiseOptimizer`.
    **options
        See `Optimizer`.
    """

    def __init__(
        self,
        learning_rate: LearningRate = 0.1,
        momentum: float = 0.9,
        trust_coefficient: float = 0.001,
        weight_decay: float = 0.0005,
        exclude_from_layer_adaptation: Iterable[str] = (),
        **options: Unpack[OptionsButDecay],
    ) -> None:
        if not 0 <= momentum <= 1:
            raise ValueError(f"momentum must be from 0 to 1, got {momentum}")
        self.momentum = momentum
        self.trust_coefficient = trust_coefficient
        super().__init__(learning_rate, exclude_from_layer_adaptation, weight_decay=weight_decay, **options)


class LAMB(LAMBRule, LayerwiseOptimizer):
    """Adam with a learning rate for each variable (You et al., 2020, arXiv:1904.00962, algorithm 2).

    Running means m and v as in `Adam`, both corrected for their start; ``step = m / (sqrt(v) + epsilon) +
    weight_decay * p``, then ``p -= learning_rate * norm(p) / norm(step) * step``.

    Parameters
    ----------
    learning_rate : float or callable
        See `Optimizer`.
    beta_1, beta_2 : float
    epsilon : float
    weight_decay : float, optional
        As in the paper it is part of the step whose norm is taken; Keras decays the weights apart from it.
    exclude_from_layer_adaptation : iterable of str
        See `LayerwiseOptimizer`.
    **options
        See `Optimizer`.
    """

    def __init__(
        self,
        learning_rate: LearningRate = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        weight_decay: float | None = None,
        exclude_from_layer_adaptation: Iterable[str] = (),
        **options: Unpack[OptionsButDecay],
    ) -> None:
        self.beta_1 = beta_1
        self.beta_2 = beta_2
        self.epsilon = epsilon
        super().__init__(learning_rate, exclude_from_layer_adaptation, weight_decay=weight_decay, **options)
