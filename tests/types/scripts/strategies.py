"""A loop of one's own under each strategy, as `mypy --strict` wants it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
from numpy.typing import NDArray

import mpidist

Array = NDArray[numpy.float32]
OPTIONS = mpidist.CommunicationOptions(timeout_seconds=60, implementation=mpidist.CollectiveCommunication.RING)
STRATEGIES: list[Callable[[], mpidist.Strategy]] = [
    mpidist.get_strategy,
    mpidist.MirroredStrategy,
    mpidist.MultiWorkerMirroredStrategy,
    mpidist.CentralStorageStrategy,
    mpidist.TPUStrategy,
    lambda: mpidist.OneDeviceStrategy("/cpu:0"),
    lambda: mpidist.MirroredStrategy(cross_device_ops=mpidist.RingAllReduce()),
    lambda: mpidist.experimental.MultiWorkerMirroredStrategy(communication="auto"),
    lambda: mpidist.MultiWorkerMirroredStrategy(communication_options=OPTIONS),
]


def train(strategy: mpidist.Strategy) -> float:
    with strategy.scope():
        w = mpidist.Variable(numpy.zeros(3, "float32"), name="w")
        count = mpidist.Variable(
            0, dtype="int64", synchronization="on_read", aggregation=mpidist.VariableAggregation.SUM
        )
        optimizer = mpidist.optimizers.SGD(0.05, momentum=0.9, clipnorm=1.0)
    x = numpy.random.default_rng(0).normal(size=(32, 3)).astype("float32")
    dataset = mpidist.data.Dataset.from_arrays((x, x.sum(axis=1))).shuffle(seed=0).batch(8)

    def step(batch: tuple[Array, Array]) -> float:
        x, y = batch
        error = x @ w.value - y
        count.assign_add(len(x))
        optimizer.apply_gradients([(2 * x.T @ error / 8, w)])
        replica = mpidist.get_replica_context()
        total: Array = replica.all_reduce(mpidist.ReduceOp.SUM, (error**2).sum(keepdims=True))
        own: mpidist.Strategy = replica.strategy
        return float(total[0]) / own.num_replicas_in_sync

    def rows(context: mpidist.InputContext) -> mpidist.data.Dataset:
        return dataset.unbatch().batch(context.get_per_replica_batch_size(8))

    loss = 0.0
    for batch in strategy.experimental_distribute_dataset(dataset):
        loss = strategy.run(step, args=(batch,))
    for batch in strategy.distribute_datasets_from_function(rows):
        loss = strategy.run(step, (batch,))
    everywhere: list[Any] = strategy.gather(numpy.array([loss]), axis=0).tolist()
    mean: float = strategy.reduce("mean", loss, axis=None)
    assert len(everywhere) == strategy.num_replicas_in_sync and mean > 0
    shape: tuple[int, ...] = w.shape
    value: NDArray[Any] = w.read_value()
    w.assign(value).assign_sub([0, 0, 0])
    assert shape == (3,) and strategy.extended.replica_id == 0
    return loss


if __name__ == "__main__":
    for make in STRATEGIES:
        train(make())
    resolver = mpidist.MultiWorkerMirroredStrategy().cluster_resolver
    print(resolver.task_type, resolver.task_id + 1, resolver.cluster_spec().num_tasks("worker"))
