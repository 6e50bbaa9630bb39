"""The replicas that a model trains on: those of a strategy, or all ranks of the job where no strategy is in force."""

from __future__ import annotations

from typing import Any

from mpidist import context
from mpidist.frameworks import replicas
from mpidist.frameworks.replicas import Replicas
from mpidist.strategies.parameter_server import ParameterServerStrategy


def replicas_of(strategy: Any = None) -> Replicas:
    """Return the replicas of a strategy; None for the strategy in force, or all ranks of the job where there is none.

    Collective at the first call, which may start MPI.  NotImplementedError for a strategy on which PyTorch's models are
    not trained.
    """
    strategy = context.get_strategy() if strategy is None else strategy
    if isinstance(strategy, ParameterServerStrategy) or strategy.extended.num_logical_devices > 1:
        raise NotImplementedError(
            f"a PyTorch model is not trained under {strategy!r}: use MultiWorkerMirroredStrategy or MirroredStrategy, "
            "whose replicas are whole and stay alike"
        )
    return replicas.replicas_of(strategy)
