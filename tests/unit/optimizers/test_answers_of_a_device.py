"""Steps whose norms a device finds, and of which it says later whether they were left out."""

from __future__ import annotations

import copy
import pickle

import numpy
import pytest

import mpidist
from mpidist import arrays, optimizers
from mpidist.device.answers import Answer
from mpidist.optimizers import SGD, Adam, LossScaleOptimizer
from mpidist.testing import device, run_ranks
from mpidist.testing.device import DeviceArray, on_device, pretended_device
from mpidist.variables import IndexedSlices, Variable


@pytest.fixture(autouse=True)
def pretended():
    with pretended_device(""):
        yield


@pytest.fixture
def asked(monkeypatch):
    """Note each question whether a step was left out."""
    found = []

    class Noted(Answer):
        def __call__(self):
            found.append(self)
            return super().__call__()

    monkeypatch.setattr(device, "Answer", Noted)
    return found


def forbid(monkeypatch):
    """Make numbers that the host asks of the device errors."""

    def refuse(array):
        raise AssertionError("the host waits for the device")

    for name in ("__float__", "__bool__", "__int__", "item", "tolist"):
        monkeypatch.setattr(DeviceArray, name, refuse)


def variables(*values):
    return [Variable(on_device(numpy.array(each, "f8"))) for each in values]


def apply(optimizer, own, *gradients):
    optimizer.apply_gradients([(on_device(numpy.array(g, "f8")), v) for g, v in zip(gradients, own, strict=True)])


def values(own):
    return [arrays.as_host(v.value).tolist() for v in own]


@pytest.mark.parametrize("option", ["clipnorm", "global_clipnorm"])
def test_norms_are_found_without_a_wait(monkeypatch, asked, option):
    own, optimizer = variables([0.0, 0.0], [0.0]), SGD(1.0, **{option: 2.0})
    forbid(monkeypatch)
    apply(optimizer, own, [3.0, 0.0], [4.0])
    apply(optimizer, own, [0.0, 0.5], [0.0])
    expected = [[-2.0, -0.5], [-2.0]] if option == "clipnorm" else [[-3 * 0.4, -0.5], [-4 * 0.4]]
    assert values(own) == expected
    assert optimizer.iterations == 2 and not asked


def test_a_step_is_settled_when_the_next_one_begins(monkeypatch, asked):
    own, optimizer = variables([0.0, 1.0]), SGD(1.0, skip_nonfinite=True)
    forbid(monkeypatch)
    counts = []
    for bad in (0.0, numpy.nan, 0.0, numpy.inf):
        apply(optimizer, own, [1.0, bad])
        counts.append(len(set(asked)))
    assert counts == [0, 1, 2, 3]
    assert values(own) == [[-2.0, 1.0]]
    assert (optimizer.iterations, optimizer.skipped_steps) == (2, 2)
    assert len(set(asked)) == 4


@pytest.mark.parametrize("first", ["iterations", "skipped_steps", "scale", "state", "pickle"])
def test_whoever_asks_first_gets_the_right_answer(first):
    own, optimizer = variables([0.0]), LossScaleOptimizer(Adam(0.5), 8.0, dynamic_growth_steps=2)
    seen = {
        "iterations": lambda: optimizer.iterations,
        "skipped_steps": lambda: optimizer.skipped_steps,
        "scale": lambda: optimizer.loss_scale.scale,
        "state": lambda: [optimizer.state()[name] for name in ("iterations", "skipped_steps", "loss_scale")],
        "pickle": lambda: [
            pickle.loads(pickle.dumps(each)).__dict__[name]
            for each, name in ((optimizer._stages, "_skipped_steps"), (optimizer.loss_scale, "_scale"))
        ],
    }
    expected = {
        "iterations": [1, 1, 2, 3],
        "skipped_steps": [0, 1, 1, 1],
        "scale": [8, 4, 4, 8],
        "state": [[1, 0, 8], [1, 1, 4], [2, 1, 4], [3, 1, 8]],
        "pickle": [[0, 8], [1, 4], [1, 4], [1, 8]],
    }
    found = []
    for bad in (1.0, numpy.nan, 1.0, 1.0):
        apply(optimizer, own, [bad])
        found.append(seen[first]())
    assert found == expected[first]
    for name in ("iterations", "skipped_steps", "scale", "state"):
        assert seen[name]() == expected[name][-1]


def test_a_loss_scale_that_is_held_knows_of_the_last_step():
    own, optimizer = variables([0.0]), LossScaleOptimizer(SGD(1.0), 8.0)
    held = optimizer.loss_scale
    apply(optimizer, own, [numpy.inf])
    assert held.scale == 4
    apply(optimizer, own, [numpy.inf])
    held.scale = 64.0
    assert (held.scale, optimizer.skipped_steps, optimizer.iterations) == (64, 2, 0)


def test_a_loss_is_scaled_by_a_fixed_scale_without_a_wait(asked):
    own, optimizer = variables([0.0]), SGD(1.0, skip_nonfinite=True, loss_scale_factor=8.0)
    apply(optimizer, own, [8.0])
    assert (optimizer.scale_loss(2.0), asked) == (16.0, [])
    assert (values(own), optimizer.iterations) == ([[-1.0]], 1)


def test_steps_that_are_set_stay_set():
    own, optimizer = variables([0.0]), SGD(1.0, skip_nonfinite=True)
    apply(optimizer, own, [1.0])
    optimizer.iterations = 7
    assert (optimizer.iterations, optimizer.skipped_steps) == (7, 0)
    before = optimizer.state()
    apply(optimizer, own, [numpy.nan])
    optimizer.restore(before)
    assert (optimizer.iterations, optimizer.skipped_steps) == (7, 0)


def test_a_schedule_and_adam_do_not_count_steps_that_were_left_out():
    """With every gradient 1, Adam's steps are the learning rate; the schedule's is 1 / (1 + steps made)."""
    given = []

    def schedule(steps):
        given.append(steps)
        return 1.0 / (1 + steps)

    own, optimizer = variables([0.0]), Adam(schedule, epsilon=1e-300, skip_nonfinite=True)
    for bad in (1.0, numpy.nan, 1.0, numpy.inf, numpy.nan, 1.0):
        apply(optimizer, own, [bad])
    assert given == [0, 1, 1, 2, 2, 2]
    numpy.testing.assert_allclose(values(own), [[-(1 + 1 / 2 + 1 / 3)]], rtol=1e-12)
    assert (optimizer.iterations, optimizer.skipped_steps) == (3, 3)


def test_micro_batches_are_looked_at_together():
    own, optimizer = variables([0.0]), SGD(1.0, skip_nonfinite=True, gradient_accumulation_steps=2)
    steps = []
    for bad in (1.0, 3.0, numpy.nan, 1.0, 1.0, 1.0, 1.0):
        apply(optimizer, own, [bad])
        steps.append(optimizer.micro_step)
    assert steps == [1, 0, 1, 0, 1, 0, 1]
    assert values(own) == [[-3.0]]
    assert (optimizer.iterations, optimizer.skipped_steps) == (2, 1)


def test_copies_that_share_an_optimizer_share_its_steps():
    own, optimizer = variables([0.0]), SGD(1.0, skip_nonfinite=True)
    apply(optimizer, own, [1.0])
    other = copy.copy(optimizer)
    apply(other, own, [numpy.nan])
    assert (optimizer.iterations, optimizer.skipped_steps) == (other.iterations, other.skipped_steps) == (1, 1)


def test_lists_of_one_optimizer_are_settled_in_order():
    first, second = variables([0.0]), variables([0.0], [0.0])
    optimizer = LossScaleOptimizer(SGD(1.0), 4.0, dynamic_growth_steps=1)
    apply(optimizer, first, [4.0])
    apply(optimizer, second, [8.0], [numpy.inf])
    apply(optimizer, first, [4.0])
    assert optimizer.loss_scale.scale == 8
    assert values([*first, *second]) == [[-2.0], [0.0], [0.0]]


@pytest.mark.parametrize("kind", ["launch", "answer"])
def test_an_error_leaves_no_half_state(monkeypatch, kind):
    own, optimizer = variables([0.0]), LossScaleOptimizer(SGD(1.0), 2.0)
    apply(optimizer, own, [2.0])
    assert (optimizer.iterations, optimizer.skipped_steps, optimizer.loss_scale.scale) == (1, 0, 2)

    def broken(*given):
        raise RuntimeError("the device is broken")

    with monkeypatch.context() as patch:
        patch.setattr(
            device.PretendedUpdate if kind == "launch" else Answer, "run" if kind == "launch" else "__call__", broken
        )
        if kind == "launch":
            with pytest.raises(RuntimeError, match="the device is broken"):
                apply(optimizer, own, [2.0])
        else:
            apply(optimizer, own, [2.0])
            for _ in range(2):
                with pytest.raises(RuntimeError, match="the device is broken"):
                    apply(optimizer, own, [2.0])
    made = 1 if kind == "launch" else 2
    assert values(own) == [[-made]]
    assert (optimizer.iterations, optimizer.skipped_steps) == (made, 0)
    assert optimizer.loss_scale.state()["loss_scale_steps"] == made


@pytest.mark.parametrize("rule", [lambda **given: SGD(1.0, momentum=0.5, **given), lambda **given: Adam(0.1, **given)])
def test_dense_gradients_beside_rows_are_one_launch(monkeypatch, rule):
    launched, run = [], device.PretendedUpdate.run
    monkeypatch.setattr(
        device.PretendedUpdate, "run", lambda self, *given: launched.append(len(self._given)) or run(self, *given)
    )
    shapes, found = [(3, 2), (2,), (4, 2), (5,)], {}
    for options in ({}, {"global_clipnorm": 0.5}, {"skip_nonfinite": True}):
        for place in (on_device, numpy.array):
            own, optimizer = [Variable(place(numpy.ones(shape))) for shape in shapes], rule(**options)
            for _ in range(2):
                rows = [place(numpy.ones((2, 2))), place(numpy.array([0, 2])), (3, 2)]
                optimizer.apply_gradients(
                    [(IndexedSlices(*rows), own[0]), *((place(numpy.full(v.shape, 2.0)), v) for v in own[1:])]
                )
            found[place] = values(own)
        for ours, expected in zip(found[on_device], found[numpy.array], strict=True):
            numpy.testing.assert_allclose(ours, expected, rtol=1e-14)
    assert launched == [4] * 6


class Own(SGD):
    """A user's rule, which has no formula; `calls` has the length of each gradient that it was given."""

    calls: list[int]

    def update(self, parameter, gradient, slots, step):
        self.calls.append(gradient.size)
        super().update(parameter, gradient, slots, step)


@pytest.mark.parametrize("family", ["Adagrad", "Ftrl", "RMSprop", "LARS", "LAMB"])
@pytest.mark.parametrize("option", [None, "clipnorm", "global_clipnorm", "skip_nonfinite"])
def test_rules_without_a_formula_wait_for_one_answer_a_step_at_most(monkeypatch, asked, family, option):
    make, skips = getattr(optimizers, family), option == "skip_nonfinite"
    options = {} if option is None else {option: True if skips else 0.5}
    starts, given = [[1.0, -2.0, 3.0], [0.0, 0.0], [4.0]], [[[0.5, 2.0, -1.0], [3.0, 4.0], [0.0]]] * 3
    if skips:
        given[1] = [[0.5, numpy.nan, 1.0], [3.0, 4.0], [0.0]]
    there, optimizer = [Variable(numpy.array(each)) for each in starts], make(0.1, **options)
    for step in given:
        optimizer.apply_gradients([(numpy.array(g), v) for g, v in zip(step, there, strict=True)])
    own, ours = variables(*starts), make(0.1, **options)
    counts = []
    with monkeypatch.context() as patch:
        forbid(patch)
        for step in given:
            apply(ours, own, *step)
            counts.append(len(set(asked)))
    assert counts == ([1, 2, 3] if skips else [0, 0, 0])
    assert (ours.iterations, ours.skipped_steps) == (optimizer.iterations, optimizer.skipped_steps)
    for found, expected in zip(values(own), there, strict=True):
        numpy.testing.assert_allclose(found, expected.value, rtol=1e-14)


def test_a_rule_of_the_users_is_not_called_for_steps_that_are_left_out():
    own, optimizer = variables([0.0, 0.0], []), Own(1.0, global_clipnorm=2.0, skip_nonfinite=True)
    optimizer.calls = []
    for gradient in ([3.0, 4.0], [1.0, numpy.inf], [0.0, 1.0]):
        apply(optimizer, own, gradient, [])
    assert optimizer.calls == [2, 0] * 2
    numpy.testing.assert_allclose(values(own)[0], [-1.2, -2.6], rtol=1e-15)
    assert (optimizer.iterations, optimizer.skipped_steps) == (2, 1)


class Half(optimizers.LARS):
    """A user's rule, which has a ratio of its own where a norm is 0, and takes it for a float."""

    def ratio(self, parameter_norm, step_norm, weight_decay):
        return 0.5 if parameter_norm == 0 or step_norm == 0 else parameter_norm / step_norm

    def update_slice(self, parameter, gradient, slots, scratch, coefficients):
        assert [type(each) for each in coefficients] == [float] * 3
        super().update_slice(parameter, gradient, slots, scratch, coefficients)


@pytest.mark.parametrize("place", [numpy.array, on_device])
def test_a_rule_of_the_users_says_what_its_ratio_is_where_a_norm_is_0(place):
    own = [Variable(place(numpy.array(each))) for each in ([0.0, 0.0], [3.0, 4.0])]
    optimizer = Half(1.0, 0, weight_decay=0.0)
    optimizer.apply_gradients([(place(numpy.array([2.0, 0.0])), variable) for variable in own])
    assert values(own) == [[-1.0, 0.0], [-2.0, 4.0]]


def test_what_a_device_cannot_find_is_found_by_the_host(monkeypatch, asked):
    """Of a list in which variables lie on the host.  It reads behind a wait that looks at the other ranks."""
    read = []
    forbid(monkeypatch)
    monkeypatch.setattr(arrays, "before_copies", [read.append])
    mixed, plain = [*variables([0.0]), Variable(numpy.zeros(1))], SGD(1.0, global_clipnorm=5.0)
    plain.apply_gradients([(on_device(numpy.array([6.0])), mixed[0]), (numpy.array([8.0]), mixed[1])])
    assert not asked and [each.shape for each in read] == [()]
    numpy.testing.assert_allclose(values(mixed), [[-3.0], [-4.0]])


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("why_no_link", ["", "the device is a pretended one"])
def test_all_ranks_leave_the_same_steps_out(size, why_no_link):
    def train():
        with pretended_device(why_no_link):
            strategy = mpidist.MultiWorkerMirroredStrategy()
            rank = strategy.extended.replica_id
            with strategy.scope():
                own, optimizer = variables([0.0, 0.0], [0.0]), LossScaleOptimizer(SGD(1.0, clipnorm=size), 4.0)
            scales = []
            for step in range(4):
                bad = numpy.inf if step == 1 and rank == size - 1 else 1.0
                given = [
                    numpy.array([bad, 0.0]) * optimizer.loss_scale.scale,
                    numpy.array([3.0]) * optimizer.loss_scale.scale,
                ]
                strategy.run(lambda given=given: apply(optimizer, own, *given))
                scales.append(optimizer.loss_scale.scale)
            return values(own), scales, optimizer.iterations, optimizer.skipped_steps

    assert run_ranks(size, train) == [([[-3.0 * size, 0.0], [-3.0 * size]], [4, 2, 2, 2], 3, 1)] * size
