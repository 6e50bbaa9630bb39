"""Parameter servers with a coordinator."""

from __future__ import annotations

from typing import Any

import numpy
from numpy.typing import NDArray

import mpidist
from mpidist.experimental.partitioners import MinSizePartitioner

strategy = mpidist.ParameterServerStrategy(
    num_ps=1, variable_partitioner=MinSizePartitioner(1 << 20), consistency=mpidist.parameter_server.StaleSynchronous(2)
)
with strategy.scope():
    w = mpidist.Variable(numpy.zeros(3, "float32"), name="w")
    optimizer = mpidist.optimizers.Adagrad(0.1)
coordinator = mpidist.coordinator.ClusterCoordinator(strategy)


def batches() -> mpidist.data.Dataset:
    worker = mpidist.coordinator.experimental_get_current_worker_index()
    return mpidist.data.Dataset.from_arrays(numpy.ones((8, 3), "float32")).shuffle(seed=worker).batch(4).repeat()


def step(iterator: Any) -> float:
    def train(x: NDArray[numpy.float32]) -> float:
        optimizer.apply_gradients([(x.T @ (x @ w.value - 1), w)])
        return float(x.sum())

    return strategy.run(train, args=(next(iterator),))


per_worker = iter(coordinator.create_per_worker_dataset(batches))
results: list[mpidist.coordinator.RemoteValue] = [coordinator.schedule(step, args=(per_worker,)) for _ in range(4)]
coordinator.join()
assert coordinator.done() and sum(result.fetch() for result in results) == 48
rows: NDArray[Any] = w.sparse_read([0, 1])
number: int = strategy.cluster_resolver.task_id + 1
assert rows.shape == (2,) and number == 1
