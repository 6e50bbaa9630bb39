"""Train the classifier of handwritten digits on parameter servers, each worker at its own pace.

In both styles: a chief that schedules steps, and workers that each run the whole script.

    mpirun -n 4 python examples/parameter_server.py                          # a chief, two workers, one server
    mpirun -n 6 python examples/parameter_server.py --num-ps 2
    mpirun -n 4 python examples/parameter_server.py --style between-graph    # three workers, one server
    python examples/parameter_server.py                                      # alone: no servers
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # ranks share the cores among them; before NumPy is loaded

import argparse  # noqa: E402
from typing import Any  # noqa: E402

import digits  # noqa: E402
import mlp  # noqa: E402
import numpy  # noqa: E402

import mpidist  # noqa: E402

LEARNING_RATE = 0.004


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--style", choices=["coordinator", "between-graph"], default="coordinator")
    parser.add_argument("--num-ps", type=int, help="ranks that are servers; default: as the job says, else one a node")
    parser.add_argument("--epochs", type=int, default=30, help="how often the rows are seen, by all workers together")
    parser.add_argument("--batch-size", type=int, default=64, help="rows of a worker's step")
    parser.add_argument("--checkpoint", metavar="FILE", help="save the model there at the end")
    return parser.parse_args()


arguments = parse_arguments()
strategy = mpidist.ParameterServerStrategy(num_ps=arguments.num_ps)  # on the servers, this is the last line
train, test = digits.load()
total_steps = arguments.epochs * (len(train.images) // arguments.batch_size)
with strategy.scope():
    variables = [mpidist.Variable(value, name=name) for name, value in mlp.initial(seed=0).items()]
    # Gradients are a step or two old: towards the end, small steps let that settle.
    optimizer = mpidist.optimizers.Adam(mpidist.optimizers.schedules.CosineDecay(LEARNING_RATE, total_steps))


def batches(worker: int) -> mpidist.data.Dataset:
    """Return the rows, again and again: each worker sees all of them, in an order of its own."""
    return mpidist.data.Dataset.from_arrays(tuple(train)).shuffle(seed=worker).batch(arguments.batch_size).repeat()


def train_step(batch: Any) -> float:
    """Read the variables, and push the gradients of a batch."""
    images, labels = batch
    loss, gradients = mlp.value_and_grad([each.value for each in variables], images, labels, len(images))
    optimizer.apply_gradients(zip(gradients, variables, strict=True))
    return float(loss)


def scheduled_step(iterator: Any) -> float:
    """Make a step on the next batch of the worker that runs it."""
    return strategy.run(train_step, args=(next(iterator),))


def worker_batches() -> mpidist.data.Dataset:
    """Return the batches of the worker that calls it."""
    return batches(mpidist.coordinator.experimental_get_current_worker_index())


def train_by_coordinator() -> None:
    """Schedule all steps; returns on the chief only."""
    coordinator = mpidist.coordinator.ClusterCoordinator(strategy)  # on the workers, this is the last line
    iterator = iter(coordinator.create_per_worker_dataset(worker_batches))
    for epoch in range(arguments.epochs):
        steps = total_steps // arguments.epochs
        losses = [coordinator.schedule(scheduled_step, args=(iterator,)) for _ in range(steps)]
        coordinator.join()
        if epoch % 10 == 9:
            print(f"epoch {epoch + 1}: loss {numpy.mean(coordinator.fetch(losses)):.4f}", flush=True)


def train_between_graph() -> None:
    """Train on this worker, until all workers together have made the steps."""
    iterator = iter(batches(strategy.cluster_resolver.task_id + 10 * strategy.extended.is_chief))
    while optimizer.iterations < total_steps:
        strategy.run(train_step, args=(next(iterator),))


def accuracy() -> float:
    """Return the share of the test rows that are classified right."""
    scores = mlp.logits([each.value for each in variables], test.images)
    return float((scores.argmax(axis=1) == test.labels.argmax(axis=1)).mean())


if arguments.style == "coordinator":
    train_by_coordinator()
else:
    train_between_graph()
if arguments.checkpoint:
    mpidist.Checkpoint(model={each.name: each for each in variables}, optimizer=optimizer).save(arguments.checkpoint)
if strategy.extended.is_chief:
    print(f"{optimizer.iterations} updates, test accuracy {accuracy():.4f}", flush=True)
