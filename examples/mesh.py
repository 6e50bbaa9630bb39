"""Train two layers whose weight matrices are split over the ranks of a replica.

With 4 ranks and ``--devices 2`` there are two replicas of two ranks: the batch is split between the replicas, and the
weights inside them.  Each rank of a replica holds half of the hidden units: half of the first matrix's columns, and
the half of the second one's rows that belongs to them.

    mpirun -n 2 python examples/mesh.py
    mpirun -n 4 python examples/mesh.py --devices 2
    python examples/mesh.py --devices 1
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # ranks share the cores among them; before NumPy is loaded

import argparse  # noqa: E402
from collections.abc import Sequence  # noqa: E402
from typing import Any  # noqa: E402

import numpy  # noqa: E402

import mpidist  # noqa: E402
from mpidist.strategies.tpu.mesh import MeshReplicaContext  # noqa: E402

ROWS, INPUTS, HIDDEN, OUTPUTS, BATCH = 512, 8, 64, 3, 64


def make_strategy(devices: int) -> mpidist.TPUStrategy:
    """Return a strategy whose replicas are `devices` neighbouring ranks of a node."""
    topology = mpidist.tpu.experimental.initialize_tpu_system()
    assignment = mpidist.tpu.experimental.DeviceAssignment.build(topology, computation_shape=[1, 1, 1, devices])
    return mpidist.TPUStrategy(experimental_device_assignment=assignment)


def examples() -> tuple[numpy.ndarray, numpy.ndarray]:
    """Return rows and targets; the targets are what another network of this kind makes of the rows."""
    random = numpy.random.default_rng(1)
    rows = random.standard_normal((ROWS, INPUTS))
    teacher = [random.standard_normal(shape) / shape[0] ** 0.5 for shape in ((INPUTS, 12), (12, OUTPUTS))]
    return rows, numpy.tanh(rows @ teacher[0]) @ teacher[1]


class SplitLayers:
    """A hidden layer and an output layer, of which every rank of a replica has the part of some hidden units."""

    def __init__(self, devices: int) -> None:
        random = numpy.random.default_rng(0)  # the chief's values count; each rank keeps its part of them
        first, second = random.standard_normal((INPUTS, HIDDEN)) / 3, random.standard_normal((HIDDEN, OUTPUTS)) / 8
        self.kernel = mpidist.Variable(first, name="hidden/kernel", partition_dimensions=[1, devices])
        self.bias = mpidist.Variable(numpy.zeros(HIDDEN), name="hidden/bias", partition_dimensions=[devices])
        self.output = mpidist.Variable(second, name="output/kernel", partition_dimensions=[devices, 1])

    def loss_and_gradients(self, rows: Any, targets: Any, global_batch: int) -> tuple[float, list[tuple[Any, Any]]]:
        """Return this replica's part of the mean squared error, and this rank's gradients with their variables."""
        replica = mpidist.get_replica_context()
        assert isinstance(replica, MeshReplicaContext)
        hidden = numpy.tanh(rows @ self.kernel.value + self.bias.value)  # this rank's units
        outputs = replica.logical_all_reduce("SUM", hidden @ self.output.value)  # of all units
        error = outputs - targets
        d_outputs = 2 * error / (global_batch * OUTPUTS)
        d_hidden = (d_outputs @ self.output.value.T) * (1 - hidden**2)
        gradients = [rows.T @ d_hidden, d_hidden.sum(axis=0), hidden.T @ d_outputs]
        loss = (error**2).sum() / (global_batch * OUTPUTS)
        return loss, list(zip(gradients, (self.kernel, self.bias, self.output), strict=True))


def train(devices: int, epochs: int) -> tuple[list[float], SplitLayers]:
    """Return the mean loss of every epoch, and the layers.  Collective: every rank calls it."""
    strategy = make_strategy(devices)
    with strategy.scope():
        layers = SplitLayers(devices)
        optimizer = mpidist.optimizers.SGD(0.2, momentum=0.9)

    def step(batch: tuple[Any, Any]) -> float:
        loss, gradients_and_variables = layers.loss_and_gradients(*batch, BATCH)
        optimizer.apply_gradients(gradients_and_variables)  # summed over the replicas, for each part by itself
        return loss

    dataset = mpidist.data.Dataset.from_arrays(examples()).shuffle(seed=0).batch(BATCH)
    distributed = strategy.experimental_distribute_dataset(dataset)
    losses = []
    for _ in range(epochs):
        steps = [strategy.reduce("SUM", strategy.run(step, args=(batch,)), axis=None) for batch in distributed]
        losses.append(float(numpy.mean(steps)))
    return losses, layers


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=2, help="ranks that share a replica's weights; default: 2")
    parser.add_argument("--epochs", type=int, default=20)
    arguments = parser.parse_args(argv)
    if mpidist.size() % arguments.devices:
        refusal = f"{mpidist.size()} ranks are not a whole number of replicas of {arguments.devices} ranks each"
        cure = f"start {arguments.devices}, {2 * arguments.devices}, ... ranks, or give another number of --devices"
        parser.exit(2, f"mesh.py: {refusal}: {cure}\n" if mpidist.rank() == 0 else None)
    losses, layers = train(arguments.devices, arguments.epochs)
    extended = layers.kernel.strategy.extended
    if extended.replica_id == extended.logical_device == 0:
        print(f"replicas: {extended.num_replicas}, each of {extended.num_logical_devices} ranks")
        print(f"hidden/kernel: {layers.kernel.shape} of ({INPUTS}, {HIDDEN}) on each rank")
        print(f"loss {losses[0]:.4f} in epoch 1, {losses[-1]:.4f} in epoch {len(losses)}")


if __name__ == "__main__":
    main()
