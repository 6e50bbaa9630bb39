"""What distributing a Keras model adds to a training step, beside the reduction itself.

    KERAS_BACKEND=torch mpidist run -n 2 benchmarks/keras_step.py

Each rank trains a model of its own on its rows, then all ranks train one model on the global batches, then the same
arrays are reduced alone.  The seam is what is left: distributed - alone - reduction.  These take turns, and of each the
quickest epoch counts.
"""

from __future__ import annotations

import os

os.environ.setdefault("KERAS_BACKEND", "jax")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1")

import argparse  # noqa: E402
import json  # noqa: E402
import time  # noqa: E402
from typing import Any  # noqa: E402

import keras  # noqa: E402
import numpy  # noqa: E402

import mpidist  # noqa: E402


def make_model(width: int) -> keras.Model:
    layers = [keras.layers.Dense(width, activation="tanh"), keras.layers.Dense(width, activation="tanh")]
    return keras.Sequential([keras.Input((64,)), *layers, keras.layers.Dense(10)])


def compiled(model: keras.Model) -> keras.Model:
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.01), loss, metrics=["accuracy"])
    return model


class Stopwatch(keras.callbacks.Callback):
    """Keeps the seconds that the steps of an epoch took, without what comes before and after them."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float] = []
        self._begun = 0.0

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if batch == 1:  # the first step of an epoch takes the order of its rows along
            self._begun = time.perf_counter()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._last = time.perf_counter()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.seconds.append(self._last - self._begun)


def shortest_step(model: keras.Model, x: Any, y: Any, batch_size: int, epochs: int) -> float:
    """Return the seconds of a step, in the quickest epoch."""
    watch = Stopwatch()
    model.fit(x, y, batch_size=batch_size, epochs=epochs, shuffle=False, verbose=0, callbacks=[watch])
    return min(watch.seconds) / (-(-len(x) // batch_size) - 1)


def shortest_reduction(strategy: Any, model: keras.Model, steps: int, epochs: int) -> float:
    """Return the seconds of a reduction of the model's gradients, in the quickest row of them."""
    arrays = [numpy.ones(tuple(each.shape), "float32") for each in model.trainable_variables]
    arrays.append(numpy.zeros(1, "float32"))

    def run() -> float:
        bound = mpidist.get_replica_context().all_reduce_init("SUM", arrays)
        found = []
        for _ in range(epochs):
            begun = time.perf_counter()
            for _ in range(steps):
                bound(arrays)
            found.append((time.perf_counter() - begun) / steps)
        return min(found)

    return strategy.run(run)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--rows", type=int, default=64, help="of a global batch")
    parser.add_argument("--steps", type=int, default=200, help="of an epoch")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    if keras.backend.backend() == "torch":
        import torch

        torch.set_num_threads(1)
    strategy = mpidist.MultiWorkerMirroredStrategy()
    replicas = strategy.num_replicas_in_sync
    x = numpy.random.default_rng(0).normal(size=(given.rows * given.steps, 64)).astype("float32")
    y = numpy.random.default_rng(1).integers(0, 10, len(x))
    alone, together = compiled(make_model(given.width)), strategy.distribute(compiled(make_model(given.width)))
    own = slice(0, len(x) // replicas)
    found: dict[str, float] = {}
    for _ in range(given.rounds):
        for name, value in {
            "alone": shortest_step(alone, x[own], y[own], given.rows // replicas, given.epochs),
            "distributed": shortest_step(together, x, y, given.rows, given.epochs),
            "reduction": shortest_reduction(strategy, together, given.steps, given.epochs),
        }.items():
            found[name] = min(value * 1e3, found.get(name, numpy.inf))
    if strategy.extended.is_chief:
        found["seam"] = found["distributed"] - found["alone"] - found["reduction"]
        facts = {"backend": keras.backend.backend(), "ranks": replicas, "parameters": together.count_params()}
        print(json.dumps({**facts, "milliseconds a step": {name: round(value, 3) for name, value in found.items()}}))


if __name__ == "__main__":
    main()
