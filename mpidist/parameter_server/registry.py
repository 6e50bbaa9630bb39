"""`Registry`: the variables and optimizers of this process that servers hold, by number.

Numbers are those of creation, and so the same on all ranks that run the same program.  What travels between ranks is
pickled as a number, and found again here.
"""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy

from mpidist.optimizers.base import Optimizer

#: Variables of this number and above are no variables of the program: they carry words of the first worker.
WORDS = 1 << 30


class Registry:
    """What servers hold for the program of this process.  All Local."""

    on_save: Callable[[Path], object] | None = None

    def __init__(self, client: Any, extended: Any) -> None:
        self.client = client
        self.extended = extended
        self.variables: dict[int, Any] = {}
        self.optimizers: dict[int, Optimizer] = {}
        self.metrics: dict[int, Any] = {}

    def by_name(self) -> dict[str, Any]:
        """Return the variables by name, in the order of creation."""
        return {variable.name: variable for _, variable in sorted(self.variables.items())}

    def add_optimizer(self, optimizer: Optimizer, number: int | None = None) -> int:
        """Number an optimizer, by default in turn, and return its number."""
        if number is None:
            number = max(self.optimizers, default=-1) + 1
        self.optimizers[number] = optimizer
        return number


class _OfThread(threading.local):
    registry: Registry | None = None


_of_thread = _OfThread()
_of_process: list[Registry] = []


def install(registry: Registry) -> None:
    """Make `registry` the one of this process, and of this thread where ranks are threads.  Local."""
    _of_thread.registry = registry
    _of_process[:] = [registry]


def installed() -> Registry:
    """Return the registry of this process.  Local."""
    registry = _of_thread.registry or (_of_process[0] if _of_process else None)
    if registry is None:
        raise RuntimeError(
            "this process has made no ParameterServerStrategy, and so knows no variables of servers; make it before "
            "variables or optimizers of one are unpickled"
        )
    return registry


def strategy_here() -> Any:
    """Return this process's strategy; unpickling calls this.  Local."""
    return installed().extended._strategy


def variable_of(number: int, description: dict[str, Any]) -> Any:
    """Return this process's variable of a number; unpickling calls this.  Local, but asks the servers for a new one."""
    registry = installed()
    if number not in registry.variables:
        registry.variables[number] = registry.extended.described_variable(description)
    return registry.variables[number]


def optimizer_of(number: int, content: bytes) -> Optimizer:
    """Return this process's optimizer of a number; unpickling calls this.  Local."""
    registry = installed()
    if number not in registry.optimizers:
        optimizer: Optimizer = pickle.loads(content)
        registry.add_optimizer(optimizer, number)
        registry.extended.adopt_optimizer(optimizer, number)
    return registry.optimizers[number]


def metric_of(number: int, kind: Any, own: dict[str, Any], shapes: dict[str, tuple[int, ...]], variable: Any) -> Any:
    """Return this process's metric of a number; unpickling calls this.  Local."""
    registry = installed()
    if number not in registry.metrics:
        metric = kind.__new__(kind)
        vars(metric).update(own, sums={name: numpy.zeros(shape) for name, shape in shapes.items()})
        registry.extended.adopt_metric(metric, number, variable)
    return registry.metrics[number]


def served_sums() -> list[Any]:
    """Return the sums of this process's metrics that are a server's, in the order of the metrics.  Local."""
    metrics = {} if _of_thread.registry is None else _of_thread.registry.metrics
    return [metric.remote for _, metric in sorted(metrics.items()) if metric.remote is not None]
