"""Learning-rate schedules against their closed forms."""

from __future__ import annotations

import math

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpidist import optimizers
from mpidist.optimizers import schedules
from mpidist.variables import Variable

STEPS = st.integers(0, 400)


@given(STEPS)
def test_closed_forms(step):
    share = min(step, 100) / 100
    assert schedules.Constant(0.3)(step) == 0.3
    assert schedules.ExponentialDecay(0.3, 100, 0.5)(step) == pytest.approx(0.3 * 0.5 ** (step / 100))
    assert schedules.ExponentialDecay(0.3, 100, 0.5, staircase=True)(step) == 0.3 * 0.5 ** (step // 100)
    assert schedules.InverseTimeDecay(0.3, 100, 0.5)(step) == pytest.approx(0.3 / (1 + step / 200))
    assert schedules.PolynomialDecay(0.3, 100, 0.1)(step) == pytest.approx(0.3 - 0.2 * share)
    assert schedules.PolynomialDecay(0.3, 100, 0.1, power=2)(step) == pytest.approx(0.1 + 0.2 * (1 - share) ** 2)
    cosine = (1 + math.cos(math.pi * share)) / 2
    assert schedules.CosineDecay(0.3, 100)(step) == pytest.approx(0.3 * cosine)
    assert schedules.CosineDecay(0.3, 100, alpha=0.1)(step) == pytest.approx(0.03 + 0.27 * cosine)


@given(STEPS)
def test_warm_ups(step):
    cosine = schedules.CosineDecay(0.4, 100)
    expected = 0.4 * step / 20 if step < 20 else cosine(step - 20)
    assert schedules.WarmUp(cosine, 20)(step) == pytest.approx(expected)
    assert schedules.CosineDecay(0.0, 100, warmup_target=0.4, warmup_steps=20)(step) == pytest.approx(expected)
    assert schedules.WarmUp(0.4, 20, start=0.2)(step) == pytest.approx(0.2 + 0.01 * min(step, 20))


def test_pieces_end_with_their_boundary():
    schedule = schedules.PiecewiseConstantDecay([2, 5], [1.0, 0.5, 0.1])
    assert [schedule(step) for step in range(8)] == [1, 1, 1, 0.5, 0.5, 0.5, 0.1, 0.1]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: schedules.PiecewiseConstantDecay([2], [1.0]), r"1 less than the length of values. .*boundaries=\[2\]"),
        (lambda: schedules.PiecewiseConstantDecay([5, 2], [1.0, 2.0, 3.0]), r"boundaries must ascend, got \[5, 2\]"),
        (lambda: schedules.ExponentialDecay(0.1, 0, 0.5), "decay_steps must be positive, got 0"),
        (lambda: schedules.WarmUp(0.1, 0), "steps must be positive, got 0"),
    ],
)
def test_wrong_arguments(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_an_optimizer_asks_its_schedule_at_every_step():
    rates = [1.0, 0.5, 0.25]
    optimizer, v = optimizers.SGD(schedules.PiecewiseConstantDecay([0, 1], rates)), Variable(numpy.zeros(1))
    seen = []
    for _ in rates:
        seen.append(optimizer.learning_rate)
        optimizer.apply_gradients([(numpy.ones(1), v)])
    assert seen == rates
    assert v.value.tolist() == [-sum(rates)]
    assert "learning_rate" not in optimizer.state()
