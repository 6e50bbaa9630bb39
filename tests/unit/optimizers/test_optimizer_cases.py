"""TensorFlow's observed cases of topic ``optimizer``: a linear regression, on a rank for each replica."""

from __future__ import annotations

import numpy
import pytest

import mpidist
from mpidist import optimizers
from mpidist.input import Dataset
from mpidist.strategies.multi_worker_mirrored import MultiWorkerMirroredStrategy
from mpidist.testing import run_ranks
from mpidist.variables import Variable
from mpidist.world import world_communicator
from tests.oracle.cases import cases

CASES = cases("optimizer")
OPTIMIZERS = {
    "SGD(0.1)": lambda: optimizers.SGD(0.1),
    "SGD(0.02)": lambda: optimizers.SGD(0.02),
    "SGD(0.05)": lambda: optimizers.SGD(0.05),
    "SGD(0.1,momentum=0.9)": lambda: optimizers.SGD(0.1, momentum=0.9),
    "AdamW(0.1,wd=0.01)": lambda: optimizers.AdamW(0.1, weight_decay=0.01),
    "RMSprop(0.05)": lambda: optimizers.RMSprop(0.05),
    "Adagrad(0.5)": lambda: optimizers.Adagrad(0.5),
}


def train(name):
    """Return loss, W and b after every step, as seen by this rank."""
    case = CASES[name]["input"]
    divide_by_local_rows = "wrong_mean" in name
    x, y = numpy.array(case["x"], "float32"), numpy.array(case["y"], "float32")
    strategy = MultiWorkerMirroredStrategy()
    with strategy.scope():
        w = Variable(numpy.array(case["W0"], "float32").reshape(2, 1), name="W")
        b = Variable(numpy.array(case["b0"], "float32"), name="b")
        optimizer = OPTIMIZERS[case["optimizer"]]()

    def step(batch):
        x, y = batch
        error = x @ w.value + b.value - y
        rows = len(x) if divide_by_local_rows else case["global_batch"]
        optimizer.apply_gradients([(2 * x.T @ error / rows, w), (2 * error.sum(axis=0) / rows, b)])
        return (error**2).sum() / rows

    seen = []
    dataset = Dataset.from_arrays((x, y)).repeat().batch(case["global_batch"])
    for batch, _ in zip(strategy.experimental_distribute_dataset(dataset), range(case["steps"]), strict=False):
        loss = strategy.reduce("SUM", strategy.run(step, args=(batch,)), axis=None)
        seen.append({"loss": float(loss), "W": w.value.reshape(-1).tolist(), "b": b.value.tolist()})
    assert optimizer.iterations == case["steps"]
    return seen


@pytest.mark.parametrize("name", CASES)
def test_steps_are_those_of_keras(name):
    for seen in run_ranks(CASES[name]["input"]["replicas"], train, name):
        assert len(seen) == len(CASES[name]["expected"])
        for ours, theirs in zip(seen, CASES[name]["expected"], strict=True):
            for key in ("loss", "W", "b"):
                numpy.testing.assert_allclose(ours[key], theirs[key], rtol=2e-5, atol=2e-6, err_msg=key)


def test_no_case_is_forgotten():
    assert {case["input"]["optimizer"] for case in CASES.values()} == set(OPTIMIZERS)


def outside_of_run():
    strategy = MultiWorkerMirroredStrategy()
    optimizer = optimizers.SGD(0.1)
    with strategy.scope():
        v = Variable([1.0, 2.0])
        with pytest.raises(RuntimeError, match="2 replicas.*`strategy.run`"):
            optimizer.apply_gradients([([1.0, 1.0], v)])
    with pytest.raises(RuntimeError, match="2 replicas.*`strategy.run`"):
        optimizer.apply_gradients([([1.0, 1.0], v)])
    assert world_communicator().size == 2
    return v.value.tolist(), optimizer.iterations


def test_outside_of_run_is_refused_where_there_is_something_to_sum():
    assert run_ranks(2, outside_of_run) == [([1.0, 2.0], 0)] * 2


def test_outside_of_run_one_replica_just_applies():
    def apply():
        with MultiWorkerMirroredStrategy().scope():
            v = Variable([1.0, 2.0])
            optimizers.SGD(0.5).apply_gradients([([1.0, 1.0], v)])
        return v.value.tolist()

    assert run_ranks(1, apply) == [[0.5, 1.5]]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_gradients_are_summed_and_copies_are_alike(size):
    def apply():
        strategy = MultiWorkerMirroredStrategy()
        with strategy.scope():
            variables = [Variable(numpy.zeros(shape, "float32")) for shape in ((3, 2), (0, 4), ())]
        optimizer = optimizers.SGD(1.0)

        def step():
            rank = mpidist.get_replica_context().replica_id_in_sync_group
            optimizer.apply_gradients([(numpy.full(v.shape, rank + 1, "float32"), v) for v in variables])

        strategy.run(step)
        return [v.value.tolist() for v in variables]

    total = -float(size * (size + 1) // 2)
    assert run_ranks(size, apply) == [[[[total] * 2] * 3, [], total]] * size


def test_gradients_that_are_sums_already_are_not_summed_again():
    def apply():
        strategy = MultiWorkerMirroredStrategy()
        with strategy.scope():
            v = Variable(numpy.zeros(2))
        optimizer = optimizers.SGD(1.0)
        strategy.run(lambda: optimizer.apply_gradients([(numpy.ones(2), v)], skip_gradients_aggregation=True))
        return v.value.tolist()

    assert run_ranks(3, apply) == [[-1.0, -1.0]] * 3
