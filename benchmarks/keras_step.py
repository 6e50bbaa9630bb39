"""What distributing a Keras model adds to a training step, beside the reduction itself.

    KERAS_BACKEND=torch mpidist run -n 2 -m benchmarks.keras_step
    KERAS_BACKEND=jax mpidist run -n 2 -m benchmarks.keras_step --save benchmarks/results    # .../keras_step-jax-2.json

Each rank trains a model of its own on its rows, then all ranks train one model on the global batches.  The seam is what
is left: distributed - alone - reduction, of which the reduction is measured inside the steps, with its waiting for the
other ranks.  *mpi4py* trains a model of each rank's own by one ``Allreduce`` of a packed array.  All are seconds of the
processor, which other programs on the machine hardly change; they take turns, and of each the quickest epoch counts.
"""

from __future__ import annotations

import os

os.environ.setdefault("KERAS_BACKEND", "jax")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1")

import argparse  # noqa: E402
import json  # noqa: E402
import math  # noqa: E402
import time  # noqa: E402
from collections.abc import Callable  # noqa: E402
from functools import partial  # noqa: E402
from typing import Any  # noqa: E402

import keras  # noqa: E402
import numpy  # noqa: E402
from mpi4py import MPI  # noqa: E402

import mpidist  # noqa: E402
from benchmarks.suite.saved import add_launch  # noqa: E402
from mpidist.frameworks.keras.classes import replica_of  # noqa: E402
from mpidist.world import world_communicator  # noqa: E402


def perceptron(width: int) -> keras.Model:
    """Return a perceptron with two layers of a width."""
    layers = [keras.layers.Dense(width, activation="tanh"), keras.layers.Dense(width, activation="tanh")]
    return keras.Sequential([keras.Input((64,)), *layers, keras.layers.Dense(10)])


def resnet18() -> keras.Model:
    """Return ResNet-18, as `torch_models` has it."""

    def normed(x: Any, outputs: int, size: int = 3, stride: int = 1) -> Any:
        x = keras.layers.Conv2D(outputs, size, stride, "same", use_bias=False)(x)
        return keras.layers.BatchNormalization()(x)

    images = keras.Input((32, 32, 3))
    x = keras.ops.relu(normed(images, 64))
    for inputs, outputs in [(64, 64), (64, 128), (128, 256), (256, 512)]:
        for stride in (1 if inputs == outputs else 2, 1):
            found = normed(keras.ops.relu(normed(x, outputs, stride=stride)), outputs)
            x = keras.ops.relu(found + (normed(x, outputs, 1, stride) if x.shape[-1] != outputs else x))
    return keras.Model(images, keras.layers.Dense(10)(keras.layers.GlobalAveragePooling2D()(x)))


#: What makes models of 9 and 150 thousand, 2.2, 11 and 25 million parameters: how many times fewer steps.
MODELS: dict[Callable[[], keras.Model], int] = {
    partial(perceptron, 64): 1,
    partial(perceptron, 350): 2,
    partial(perceptron, 1450): 10,
    resnet18: 50,
    partial(perceptron, 4960): 50,
}


class Fused(keras.optimizers.SGD):
    """Gradient descent by the means of all ranks, which one call of mpi4py for a packed array gives."""

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        flat = keras.ops.concatenate([keras.ops.reshape(each, (-1,)) for each in grads])
        means = iter(
            keras.ops.split(_mean(flat), numpy.cumsum([math.prod(each.shape) for each in grads])[:-1].tolist())
        )
        super().apply([keras.ops.reshape(next(means), each.shape) for each in grads], trainable_variables)


def _mean(flat: Any) -> Any:
    """Return the mean of an array over the ranks.  Collective."""
    if keras.backend.backend() == "torch":
        MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, flat.numpy())
        return flat.div_(MPI.COMM_WORLD.size)
    import jax

    def mean(values: Any) -> numpy.ndarray:
        found = numpy.array(values)
        MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, found)
        found /= MPI.COMM_WORLD.size
        return found

    return jax.experimental.io_callback(mean, jax.ShapeDtypeStruct(flat.shape, flat.dtype), flat, ordered=True)


def compiled(model: keras.Model, optimizer: type[keras.optimizers.Optimizer] = keras.optimizers.SGD) -> keras.Model:
    """Return a model that is ready to be trained."""
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer(0.01), loss, metrics=["accuracy"])
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


def measured(
    make: Callable[[], keras.Model], steps: int, rows: int, epochs: int, rounds: int
) -> tuple[int, dict[str, float]]:
    """Return the number of parameters of a model, and milliseconds of its steps.  Collective."""
    strategy = mpidist.MultiWorkerMirroredStrategy()
    replicas = strategy.num_replicas_in_sync
    alone, fused, together = compiled(make()), compiled(make(), Fused), strategy.distribute(compiled(make()))
    x = numpy.random.default_rng(0).normal(size=(rows * steps, *alone.input_shape[1:])).astype("float32")
    y = numpy.random.default_rng(1).integers(0, 10, len(x))
    own = slice(0, len(x) // replicas)
    lone, peer, shared = [], [], []
    for _ in range(rounds):
        lone.append(quickest_step(alone, x[own], y[own], rows // replicas, epochs)[0])
        peer.append(quickest_step(fused, x[own], y[own], rows // replicas, epochs)[0])
        shared.append(quickest_step(together, x, y, rows, epochs))
    rest, reduction = min(shared)
    found = {"alone": min(lone), "mpi4py": min(peer), "distributed": rest + reduction}
    found |= {"reduction": reduction, "seam": rest - min(lone)}
    return together.count_params(), found


def main() -> None:
    """Measure the models; rank 0 prints a line for each.  Collective."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, help="of the layers of one model, in place of all models")
    parser.add_argument("--rows", type=int, default=64, help="of a global batch, of ResNet-18 a quarter of them")
    parser.add_argument("--steps", type=int, default=100, help="of an epoch")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--save", metavar="FOLDER", help="add the launch to the results there")
    given = parser.parse_args()
    backend, communicator = keras.backend.backend(), world_communicator()
    if backend == "torch":
        import torch

        torch.set_num_threads(1)
    models = MODELS if given.width is None else {partial(perceptron, given.width): 1}
    measurements = {}
    for make, fewer in models.items():
        rows = given.rows if make is not resnet18 else max(given.rows // 4, communicator.size)
        count, found = measured(make, max(given.steps // fewer, 3), rows, given.epochs, given.rounds)
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
