"""The law: with every optimizer, every model of the examples trains on N ranks to what it trains to on one.

Even and uneven batches (some leave ranks without rows), both dtypes, and both ways in which gradients are applied: when
they are summed, and while they are.
"""

from __future__ import annotations

import functools
import itertools
import os
import sys
from pathlib import Path

import numpy
import pytest

import mpidist
from mpidist.collectives.reductions import update
from mpidist.optimizers import LAMB, LARS, SGD, Adagrad, Adam, AdamW, Ftrl, LossScaleOptimizer, RMSprop, schedules

sys.path.append(str(Path(__file__).parents[2] / "examples"))
pytestmark = [pytest.mark.mpi, pytest.mark.filterwarnings("ignore:OneDeviceStrategy reduces nothing")]

STEPS = 20
#: batch -> rows: of one all batches are alike and go into 1, 2, 3, 4 and 8 equal parts; of the other neither.
BATCHES = {24: 48, 10: 46}
OPTIMIZERS = {
    "sgd": lambda: SGD(0.1),
    "nesterov": lambda: SGD(0.05, momentum=0.9, nesterov=True),
    "adam": lambda: Adam(0.002),
    "adamw": lambda: AdamW(0.002, weight_decay=0.01),
    "adagrad": lambda: Adagrad(0.02),
    "ftrl": lambda: Ftrl(0.02, initial_accumulator_value=0.5),
    "rmsprop": lambda: RMSprop(0.002, momentum=0.5),
    "centered": lambda: RMSprop(0.002, centered=True),
    "lars": lambda: LARS(0.5, trust_coefficient=0.05),
    "lamb": lambda: LAMB(0.005, weight_decay=0.01),
    "clipvalue": lambda: SGD(0.1, momentum=0.9, clipvalue=0.01),
    "clipnorm": lambda: SGD(0.1, momentum=0.9, clipnorm=0.5),
    "global": lambda: Adam(0.002, global_clipnorm=0.5),
    "accumulated": lambda: SGD(0.1, momentum=0.9, gradient_accumulation_steps=3),
    "scaled": lambda: LossScaleOptimizer(SGD(0.1, momentum=0.9), 2.0**10),
    "schedule": lambda: SGD(schedules.WarmUp(schedules.CosineDecay(0.2, 15), 5), momentum=0.9),
}
#: Gradients are applied *when* they are summed or *while*, for which some optimizers must know whole sums first.
WAYS = [(name, "when") for name in OPTIMIZERS] + [
    (name, "while") for name in OPTIMIZERS if OPTIMIZERS[name]().elementwise
]


def model(name):
    return pytest.importorskip(name, reason="the model's library is not installed", exc_type=SystemExit)


@functools.cache
def rows(count, dtype):
    random = numpy.random.default_rng(5)
    labels = numpy.eye(10, dtype=dtype)[random.integers(0, 10, count)]
    return random.uniform(0, 1, size=(count, 8, 8)).astype(dtype), labels


def trained(strategy, name, optimizer, dtype, batch):
    """Return all parameters, flat, after some steps."""
    net, count, optimizer = model(name), BATCHES[batch], OPTIMIZERS[optimizer]()
    with strategy.scope():
        variables = [mpidist.Variable(v.astype(dtype), name=key) for key, v in net.initial(0).items()]

    def step(images, labels, total):
        loss, gradients = net.value_and_grad([v.value for v in variables], images, labels, total)
        scaled = [optimizer.scale_loss(gradient) for gradient in gradients]
        optimizer.apply_gradients(zip(scaled, variables, strict=True))
        return loss

    dataset = mpidist.data.Dataset.from_arrays(rows(count, dtype)).shuffle(seed=3).batch(batch).repeat()
    batches = strategy.experimental_distribute_dataset(dataset)
    for number, (images, labels) in zip(range(STEPS), batches, strict=False):
        total = min(batch, count - number % -(-count // batch) * batch)
        strategy.run(step, args=(images, labels, total))
    return numpy.concatenate([v.numpy().reshape(-1) for v in variables])


@functools.cache
def alone(*arguments):
    return trained(mpidist.OneDeviceStrategy("/cpu:0"), *arguments)


#: Model, precision and batch; each optimizer meets two of them with a copy of the variables on each rank and one with
#: one copy for all, and with EVERY_GRID, as `make test-all` sets it, all.
GRID = list(itertools.product(["mlp", "cnn"], [("float64", 1e-12), ("float32", 1e-5)], BATCHES))
STRATEGIES = {
    "copies": (mpidist.MultiWorkerMirroredStrategy, (0, 4)),
    "one copy": (mpidist.CentralStorageStrategy, (3,)),
}
CASES = [
    (strategy, name, *precision, batch, *way)
    for strategy, (_, columns) in STRATEGIES.items()
    for row, way in enumerate(WAYS)
    for column, (name, precision, batch) in enumerate(GRID)
    if os.environ.get("EVERY_GRID") or (row - column) % len(GRID) in columns
]


@pytest.mark.parametrize(("variables", "name", "dtype", "tolerance", "batch", "optimizer", "way"), CASES)
def test_n_ranks_train_to_what_one_rank_trains_to(
    variables, name, dtype, tolerance, batch, optimizer, way, monkeypatch
):
    monkeypatch.setattr(update, "LEAST_BYTES", 1 if way == "while" else 1 << 40)
    strategy = STRATEGIES[variables][0]()
    found = trained(strategy, name, optimizer, dtype, batch)
    if strategy.extended.replica_id == 0:
        numpy.testing.assert_allclose(found, alone(name, optimizer, dtype, batch), rtol=tolerance, atol=tolerance)
    copies = strategy.gather(found.view(f"u{found.itemsize}")[None], axis=0)
    assert (copies == copies[0]).all()
