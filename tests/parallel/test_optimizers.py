"""The law for every optimizer on the ranks of an mpirun: N ranks equal one rank on the global batch."""

from __future__ import annotations

import numpy
import pytest

import mpidist
from mpidist.input import Dataset
from mpidist.optimizers import SGD
from tests.helpers.optimizers import OPTIMIZERS

pytestmark = pytest.mark.mpi

STEPS = 20


class Model:
    """Two layers with a tanh between, a bias, and rows of a table; sums of squared errors."""

    def __init__(self, strategy, dtype, optimizer) -> None:
        random = numpy.random.default_rng(0)
        self.strategy, self.optimizer = strategy, optimizer
        with strategy.scope():
            shapes = {"table": (7, 4), "hidden": (4, 5), "bias": (5,), "out": (5, 2)}
            self.parameters = [
                mpidist.Variable((random.normal(size=shape) / 2).astype(dtype), name=name)
                for name, shape in shapes.items()
            ]

    def step(self, batch, global_rows):
        rows, y = batch
        table, hidden, bias, out = (p.value for p in self.parameters)
        x = table[rows]
        activated = numpy.tanh(x @ hidden + bias)
        error = self.optimizer.scale_loss(2 * (activated @ out - y) / global_rows)
        back = (error @ out.T) * (1 - activated**2)
        found = mpidist.IndexedSlices(back @ hidden.T, rows)
        gradients = [found, x.T @ back, back.sum(axis=0), activated.T @ error]
        self.optimizer.apply_gradients(zip(gradients, self.parameters, strict=True))


def trained(strategy, dtype, optimizer, batch_size):
    random = numpy.random.default_rng(1)
    rows, y = random.integers(0, 7, 46), random.normal(size=(46, 2)).astype(dtype)
    model = Model(strategy, dtype, optimizer)
    dataset = Dataset.from_arrays((rows, y)).shuffle(seed=3).batch(batch_size).repeat()
    batches = strategy.experimental_distribute_dataset(dataset)
    for step, batch in zip(range(STEPS), batches, strict=False):
        left = 46 - step % -(-46 // batch_size) * batch_size
        strategy.run(model.step, args=(batch, min(batch_size, left)))
    return [p.value.copy() for p in model.parameters]


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-12), ("float32", 1e-5)])
@pytest.mark.parametrize("batch_size", [16, 5])
def test_parameters_are_those_of_one_rank(name, dtype, tolerance, batch_size):
    together = trained(mpidist.MultiWorkerMirroredStrategy(), dtype, OPTIMIZERS[name](), batch_size)
    alone = trained(mpidist.OneDeviceStrategy("/cpu:0"), dtype, OPTIMIZERS[name](), batch_size)
    for ours, expected in zip(together, alone, strict=True):
        numpy.testing.assert_allclose(ours, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_all_ranks_hold_the_same_bits(name):
    strategy = mpidist.MultiWorkerMirroredStrategy()
    parameters = trained(strategy, "float32", OPTIMIZERS[name](), 5)
    flat = numpy.concatenate([parameter.reshape(-1) for parameter in parameters]).view("uint32")
    copies = strategy.gather(flat[None], axis=0)
    assert (copies == copies[0]).all()


@pytest.mark.filterwarnings("ignore:gradients are None")
@pytest.mark.parametrize("missing", [(), (0, 7, 8)])
def test_many_short_variables_are_updated_in_runs(missing):
    """Of 100 neighbours, whose velocities after t steps of gradient g are ``-g (2 - 2 ** (1 - t))``."""
    strategy = mpidist.MultiWorkerMirroredStrategy()
    with strategy.scope():
        variables = [mpidist.Variable(numpy.zeros(n % 5, "float32")) for n in range(100)]
        optimizer = SGD(1.0, momentum=0.5)
    rank, size = strategy.extended.replica_id, strategy.num_replicas_in_sync
    gradients = [None if n in missing else numpy.full(n % 5, n * (rank + 1), "float32") for n in range(100)]
    for _ in range(3):
        strategy.run(lambda: optimizer.apply_gradients(zip(gradients, variables, strict=True)))
    for n, variable in enumerate(variables):
        total = 0 if n in missing else n * size * (size + 1) / 2
        assert set(variable.value) <= {-(1 + 1.5 + 1.75) * total}
