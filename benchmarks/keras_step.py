"""What distributing a Keras model adds to a training step, beside the reduction itself.

    KERAS_BACKEND=torch mpidist run -n 2 -m benchmarks.keras_step
    KERAS_BACKEND=jax mpidist run -n 2 -m benchmarks.keras_step --save benchmarks/results    # .../keras_step-jax-2.json

Each rank trains a model of its own on its rows, then all ranks train one model on the global batches.  The seam is what
is left: distributed - alone - reduction, of which the reduction is measured inside the steps, with its waiting for the
other ranks.  All are seconds of the processor, which other programs on the machine hardly change; the two take turns,
and of each the quickest epoch counts.
"""

from __future__ import annotations

import os

os.environ.setdefault("KERAS_BACKEND", "jax")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1")

import argparse  # noqa: E402
import json  # noqa: E402
import time  # noqa: E402
from collections.abc import Callable  # noqa: E402
from typing import Any  # noqa: E402

import keras  # noqa: E402
import numpy  # noqa: E402

import mpidist  # noqa: E402
from benchmarks.suite.saved import add_launch  # noqa: E402
from mpidist.frameworks.keras.classes import replica_of  # noqa: E402
from mpidist.world import world_communicator  # noqa: E402

#: Width of the layers of models of 9 and 150 thousand, 2.2 and 25 million parameters: how many times fewer steps.
WIDTHS = {64: 1, 350: 2, 1450: 10, 4960: 50}


def make_model(width: int) -> keras.Model:
    layers = [keras.layers.Dense(width, activation="tanh"), keras.layers.Dense(width, activation="tanh")]
    return keras.Sequential([keras.Input((64,)), *layers, keras.layers.Dense(10)])


def compiled(model: keras.Model) -> keras.Model:
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.01), loss, metrics=["accuracy"])
    return model


class Stopwatch(keras.callbacks.Callback):
    """Keeps the seconds that the steps of an epoch took, without what comes before and after them.

    Attributes
    ----------
    seconds : list of (float, float)
        Of each epoch: of its steps, and of the reductions in them.
    """

    def __init__(self, replica: Any) -> None:
        super().__init__()
        self.seconds: list[tuple[float, float]] = []
        self._begun = self._last = self._reductions = 0.0
        if replica is not None:
            replica.reduce = self._timed(type(replica).reduce.__get__(replica))

    def _timed(self, reduce: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            begun = time.process_time()
            try:
                return reduce(*args)
            finally:
                self._reductions += time.process_time() - begun

        return timed

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if batch == 1:  # the first step of an epoch takes the order of its rows along
            self._begun, self._reductions = time.process_time(), 0.0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._last = time.process_time()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.seconds.append((self._last - self._begun, self._reductions))


def quickest_step(model: keras.Model, x: Any, y: Any, batch_size: int, epochs: int) -> tuple[float, float]:
    """Return the milliseconds of a step without its reduction, and of the reduction, in the quickest epoch."""
    watch = Stopwatch(replica_of(model))
    model.fit(x, y, batch_size=batch_size, epochs=epochs, shuffle=False, verbose=0, callbacks=[watch])
    steps = -(-len(x) // batch_size) - 1
    rest, reduction = min((whole - part, part) for whole, part in watch.seconds)
    return rest / steps * 1e3, reduction / steps * 1e3


def measured(width: int, steps: int, rows: int, epochs: int, rounds: int) -> tuple[int, dict[str, float]]:
    """Return the number of parameters of a model, and milliseconds of its steps.  Collective."""
    strategy = mpidist.MultiWorkerMirroredStrategy()
    replicas = strategy.num_replicas_in_sync
    x = numpy.random.default_rng(0).normal(size=(rows * steps, 64)).astype("float32")
    y = numpy.random.default_rng(1).integers(0, 10, len(x))
    alone, together = compiled(make_model(width)), strategy.distribute(compiled(make_model(width)))
    own = slice(0, len(x) // replicas)
    lone, shared = [], []
    for _ in range(rounds):
        lone.append(quickest_step(alone, x[own], y[own], rows // replicas, epochs)[0])
        shared.append(quickest_step(together, x, y, rows, epochs))
    rest, reduction = min(shared)
    found = {"alone": min(lone), "distributed": rest + reduction, "reduction": reduction, "seam": rest - min(lone)}
    return together.count_params(), found


def main() -> None:
    """Measure the models; rank 0 prints a line for each.  Collective."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, help="of the layers of one model, in place of three models")
    parser.add_argument("--rows", type=int, default=64, help="of a global batch")
    parser.add_argument("--steps", type=int, default=100, help="of an epoch")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--save", metavar="FOLDER", help="add the launch to the results there")
    given = parser.parse_args()
    backend, communicator = keras.backend.backend(), world_communicator()
    if backend == "torch":
        import torch

        torch.set_num_threads(1)
    models = WIDTHS if given.width is None else {given.width: 1}
    measurements = {}
    for width, fewer in models.items():
        count, found = measured(width, max(given.steps // fewer, 3), given.rows, given.epochs, given.rounds)
        measurements[f"{count} parameters"] = found
        if communicator.rank == 0:
            facts = {"backend": backend, "ranks": communicator.size, "parameters": count}
            print(
                json.dumps({**facts, "milliseconds a step": {name: round(value, 3) for name, value in found.items()}})
            )
    if given.save and communicator.rank == 0:
        add_launch(given.save, "keras_step", "keras", {"milliseconds": measurements}, backend)


if __name__ == "__main__":
    main()
