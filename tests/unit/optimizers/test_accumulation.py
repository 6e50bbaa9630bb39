"""Gradient accumulation: one reduction and one update for several micro-batches, resumable between them."""

from __future__ import annotations

import numpy
import pytest

import mpidist
from mpidist import optimizers
from mpidist.testing import run_ranks
from mpidist.variables import IndexedSlices, Variable
from mpidist.world import world_communicator


def host_copies(state):
    return {key: numpy.array(value) if hasattr(value, "dtype") else value for key, value in state.items()}


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_an_update_takes_the_mean_of_its_micro_batches(dtype):
    optimizer = optimizers.SGD(1.0, gradient_accumulation_steps=3)
    v = Variable(numpy.zeros(2, dtype))
    seen = []
    for k in range(7):
        optimizer.apply_gradients([(numpy.array([k, 1], dtype), v)])
        seen.append((optimizer.iterations, optimizer.micro_step, v.value.tolist()))
    first, second = [-1.0, -1.0], [-5.0, -2.0]
    assert seen == [
        (0, 1, [0, 0]),
        (0, 2, [0, 0]),
        (1, 0, first),
        (1, 1, first),
        (1, 2, first),
        (2, 0, second),
        (2, 1, second),
    ]


def test_short_floats_are_added_in_float32():
    optimizer = optimizers.SGD(1.0, gradient_accumulation_steps=4)
    v = Variable(numpy.zeros(1, "float16"))
    for gradient in (2048, 1, 1, 2):  # 2048 + 1 is 2048 in float16
        optimizer.apply_gradients([(numpy.array([gradient], "float16"), v)])
    assert v.value.tolist() == [-513.0]


def test_limits_hold_for_the_mean():
    optimizer = optimizers.SGD(1.0, clipnorm=1.0, gradient_accumulation_steps=2)
    v = Variable(numpy.zeros(1))
    for gradient in (30.0, -29.0):
        optimizer.apply_gradients([([gradient], v)])
    assert v.value.tolist() == [-0.5]


def test_rows_and_arrays_add_up():
    def rows(values, indices):
        return IndexedSlices(numpy.array(values, "float64").reshape(-1, 1), numpy.array(indices))

    orders = [
        [rows([1, 2], [0, 2]), rows([3], [2]), numpy.ones((3, 1))],
        [numpy.ones((3, 1)), rows([3], [2]), rows([1, 2], [0, 2])],
        [rows([1, 2], [0, 2]), numpy.ones((3, 1)), rows([3], [2])],
    ]
    for gradients in orders:
        optimizer, v = optimizers.SGD(3.0, gradient_accumulation_steps=3), Variable(numpy.zeros((3, 1)))
        for gradient in gradients:
            optimizer.apply_gradients([(gradient, v)])
        assert v.value[:, 0].tolist() == [-2, -1, -6]


def test_other_variables_in_the_middle_are_refused():
    optimizer = optimizers.SGD(1.0, gradient_accumulation_steps=3)
    v, w = Variable([0.0], name="v"), Variable([0.0], name="w")
    optimizer.apply_gradients([([1.0], v)])
    with pytest.raises(ValueError, match=r"micro-batch 2 of 3 has gradients for other variables than the first.*'w"):
        optimizer.apply_gradients([([1.0], v), ([1.0], w)])


@pytest.mark.parametrize("count", [0, -2, 2.5])
def test_less_than_one_is_refused(count):
    with pytest.raises(ValueError, match=f"_steps must be a whole number of 1 or more, got {count}"):
        optimizers.SGD(1.0, gradient_accumulation_steps=count)


class Run:
    """Micro-batch k of replica r has the gradient k + r / 8; every third makes an update."""

    def __init__(self):
        self.strategy = mpidist.MultiWorkerMirroredStrategy()
        with self.strategy.scope():
            self.v = Variable(numpy.zeros(2))
        self.optimizer = optimizers.SGD(0.5, momentum=0.5, gradient_accumulation_steps=3)

    def step(self, k, share):
        gradient = numpy.array([k + self.strategy.extended.replica_id / 8, share])
        self.strategy.run(lambda: self.optimizer.apply_gradients([(gradient, self.v)]))

    def step_with_sums(self, k):
        sums = numpy.array([k, 1.0])
        self.strategy.run(lambda: self.optimizer.apply_gradients([(sums, self.v)], skip_gradients_aggregation=True))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_one_reduction_for_all_micro_batches(size):
    def count():
        run, calls = Run(), []
        for k in range(6):
            before = world_communicator().control.call
            run.step(k, 1)
            calls.append(world_communicator().control.call - before)
        return calls

    expected = run_ranks(size, count)
    assert all(calls[:2] == [0, 0] and calls[3:5] == [0, 0] for calls in expected)
    assert all(calls[2] <= 2 and calls[5] <= 1 for calls in expected)


@pytest.mark.parametrize(("before", "after"), [(1, 1), (2, 2), (3, 1), (1, 3), (2, 3)])
def test_goes_on_in_the_middle_at_any_number_of_replicas(before, after):
    def first():
        run = Run()
        for k in range(5):
            run.step(k, 1 / before)
        return host_copies(run.optimizer.state()), run.v.value.copy()

    states = run_ranks(before, first)
    state, value = states[0]
    assert all(str(other) == str(state) for other, _ in states)

    def second():
        run = Run()
        run.v.restore(value)
        run.optimizer.restore(state)
        assert str(host_copies(run.optimizer.state())) == str(state)  # not summed once more
        run.step(5, 1 / after)
        return run.v.value.copy(), run.optimizer.iterations

    # the gradients of replicas r are k + r / 8 for five micro-batches with `before` replicas, then one with `after`
    def of(size, k):
        return size * k + sum(range(size)) / 8

    one = sum(of(before, k) for k in range(3)) / 3
    two = (of(before, 3) + of(before, 4) + of(after, 5)) / 3
    expected = [-(0.5 * one) - (0.5 * 0.5 * one + 0.5 * two), -0.5 - 0.75]
    for found, iterations in run_ranks(after, second):
        numpy.testing.assert_allclose(found, expected, rtol=1e-12)
        assert iterations == 2


@pytest.mark.parametrize(("before", "after"), [(1, 1), (2, 2), (3, 1), (1, 3), (2, 3)])
def test_sums_over_replicas_are_saved_as_they_are(before, after):
    def first():
        run = Run()
        for k in range(2):
            run.step_with_sums(k)
        return host_copies(run.optimizer.state())

    states = run_ranks(before, first)
    assert all(str(state) == str(states[0]) for state in states)
    assert states[0]["accumulated/0"].tolist() == [1.0, 2.0]

    def second():
        run = Run()
        run.optimizer.restore(states[0])
        run.step_with_sums(2)
        return run.v.value.tolist()

    # half of the means (0 + 1 + 2) / 3 and (1 + 1 + 1) / 3
    assert run_ranks(after, second) == [[-0.5, -0.5]] * after


def test_a_restored_total_goes_on_with_gradients_of_replicas():
    def first():
        run = Run()
        run.step_with_sums(1)
        return host_copies(run.optimizer.state())

    state = run_ranks(2, first)[0]

    def second():
        run = Run()
        run.optimizer.restore(state)
        for k in (2, 3):
            run.step(k, 1 / 2)
        return run.v.value.tolist()

    assert run_ranks(2, second) == [[-0.5 * (1 + 2 * 2 + 1 / 8 + 2 * 3 + 1 / 8) / 3, -0.5]] * 2


def test_sums_after_gradients_of_replicas_are_refused():
    def mixed():
        run = Run()
        run.step(0, 1)
        with pytest.raises(
            ValueError, match="micro-batch 2 of 3 has skip_gradients_aggregation=True, the micro-batches before had F"
        ):
            run.step_with_sums(1)
        return run.optimizer.micro_step

    assert run_ranks(2, mixed) == [1, 1]
