"""Learn what users think of items they have not rated: embedding tables on parameter servers.

The tables are cut into shards, one on each server.  A step looks up the rows that its ratings need, and pushes
gradients for these rows only.  The ratings are made here, as many as MovieLens 100K has, from a model of low rank with
noise.

    mpirun -n 5 python examples/recommender.py --num-ps 2       # a chief, two workers, two servers
    MPIDIST_ROLES=chief:1,worker:2,ps:2 mpidist run -n 5 examples/recommender.py
    python examples/recommender.py                              # alone: no servers
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # ranks share the cores among them; before NumPy is loaded

import argparse  # noqa: E402
from typing import Any, NamedTuple  # noqa: E402

import numpy  # noqa: E402

import mpidist  # noqa: E402

USERS, ITEMS, RATINGS, TEST_RATINGS = 943, 1682, 100_000, 10_000
#: Numbers that describe a user in the ratings as they are made, and in the model, which has one more for the bias.
TRUE_RANK, RANK = 4, 8
NOISE = 0.5


class Ratings(NamedTuple):
    """Numbers of users and of items, int64, and stars from 1 to 5, float32, each of shape (rows,)."""

    users: Any
    items: Any
    stars: Any


def made(seed: int = 0) -> tuple[Ratings, Ratings]:
    """Return ratings to train on, and others to test on; no user rates an item twice."""
    random = numpy.random.default_rng(seed)
    users, items = numpy.divmod(random.choice(USERS * ITEMS, RATINGS, replace=False), ITEMS)
    tastes, traits = (random.normal(0, 1, (count, TRUE_RANK)) for count in (USERS, ITEMS))
    liked = (tastes[users] * traits[items]).sum(axis=1) / TRUE_RANK**0.5
    biases = random.normal(0, 0.4, USERS)[users] + random.normal(0, 0.4, ITEMS)[items]
    stars = numpy.clip(numpy.rint(3.5 + 0.8 * liked + biases + random.normal(0, NOISE, RATINGS)), 1, 5)
    whole = Ratings(users, items, stars.astype("float32"))
    return Ratings(*(each[TEST_RATINGS:] for each in whole)), Ratings(*(each[:TEST_RATINGS] for each in whole))


def predicted(user_rows: Any, item_rows: Any, mean: float) -> Any:
    """Return the stars for rows of the tables: a product, and a bias of each."""
    product = (user_rows[:, :RANK] * item_rows[:, :RANK]).sum(axis=1)
    return mean + product + user_rows[:, RANK] + item_rows[:, RANK]


def gradients(error: Any, user_rows: Any, item_rows: Any, decay: float) -> tuple[Any, Any]:
    """Return the gradients of half the squared errors, and of a decay, for each row that was looked up."""
    ones = numpy.ones((len(error), 1), "float32")
    of_users = error[:, None] * numpy.hstack([item_rows[:, :RANK], ones]) + decay * user_rows
    of_items = error[:, None] * numpy.hstack([user_rows[:, :RANK], ones]) + decay * item_rows
    return of_users, of_items


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-ps", type=int, help="ranks that are servers; default: as the job says, else one a node")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=1000, help="ratings of a step")
    parser.add_argument("--decay", type=float, default=0.05, help="what keeps rows small")
    return parser.parse_args()


def shard_for_each_server(shape: Any, dtype: Any) -> Any:
    """Return how a table is cut: as often as there are servers, which the strategy knows."""
    servers = strategy.cluster_resolver.cluster_spec().as_dict().get("ps", [])
    return mpidist.experimental.partitioners.FixedShardsPartitioner(max(1, len(servers)))(shape, dtype)


arguments = parse_arguments()
strategy = mpidist.ParameterServerStrategy(variable_partitioner=shard_for_each_server, num_ps=arguments.num_ps)
train, test = made()
mean_stars = float(train.stars.mean())
random = numpy.random.default_rng(1)
with strategy.scope():
    user_table, item_table = (
        mpidist.Variable(random.normal(0, 0.1, (count, RANK + 1)).astype("float32"), name=name)
        for name, count in (("users", USERS), ("items", ITEMS))
    )
    optimizer = mpidist.optimizers.Adagrad(0.1)


def worker_batches() -> mpidist.data.Dataset:
    """Return the ratings in an order of the worker's own."""
    worker = mpidist.coordinator.experimental_get_current_worker_index()
    return mpidist.data.Dataset.from_arrays(tuple(train)).shuffle(seed=worker).batch(arguments.batch_size).repeat()


def train_step(iterator: Any) -> float:
    """Look up rows, and push gradients for them; return the mean squared error."""
    users, items, stars = next(iterator)
    user_rows, item_rows = user_table.sparse_read(users), item_table.sparse_read(items)
    error = predicted(user_rows, item_rows, mean_stars) - stars
    of_users, of_items = gradients(error, user_rows, item_rows, arguments.decay)
    pairs = [
        (mpidist.IndexedSlices(of_users, users), user_table),
        (mpidist.IndexedSlices(of_items, items), item_table),
    ]
    optimizer.apply_gradients(pairs)
    return float((error**2).mean())


def main() -> None:
    """Train, and compare with the mean of all ratings."""
    coordinator = mpidist.coordinator.ClusterCoordinator(strategy)  # on the workers, this is the last line
    iterator = iter(coordinator.create_per_worker_dataset(worker_batches))
    for epoch in range(arguments.epochs):
        steps = len(train.stars) // arguments.batch_size
        errors = [coordinator.schedule(train_step, args=(iterator,)) for _ in range(steps)]
        coordinator.join()
        print(f"epoch {epoch + 1}: error {numpy.mean(coordinator.fetch(errors)) ** 0.5:.3f} stars", flush=True)
    user_rows, item_rows = user_table.sparse_read(test.users), item_table.sparse_read(test.items)
    error = predicted(user_rows, item_rows, mean_stars) - test.stars
    guess = test.stars - mean_stars
    print(
        f"{getattr(user_table, 'num_shards', 1)} shards, test error {(error**2).mean() ** 0.5:.3f} stars, "
        f"of the mean of all ratings {(guess**2).mean() ** 0.5:.3f}",
        flush=True,
    )


main()
