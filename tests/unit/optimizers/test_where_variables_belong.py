"""`apply_gradients` says what is wrong with variables that are not of the strategy in whose replica it is called."""

from __future__ import annotations

import numpy
import pytest

from mpidist.optimizers import SGD
from mpidist.strategies.mirrored import MirroredStrategy
from mpidist.strategies.one_device import OneDeviceStrategy
from mpidist.testing import run_ranks
from mpidist.variables import Variable


def update(variable):
    SGD(1.0).apply_gradients([(numpy.ones(2), variable)])


def made_in(strategy):
    with strategy.scope():
        return Variable(numpy.zeros(2), name="kernel")


def forgotten_scope():
    strategy, variable = MirroredStrategy(), Variable(numpy.zeros(2), name="kernel")
    strategy.run(update, (variable,))


def two_strategies():
    first, second = MirroredStrategy(), MirroredStrategy()
    second.run(update, (made_in(first),))


def another_kind_of_strategy():
    variable = made_in(MirroredStrategy())
    OneDeviceStrategy("/cpu:0").run(update, (variable,))


def outside_of_run():
    update(made_in(MirroredStrategy()))


def in_the_scope_only():
    strategy = MirroredStrategy()
    variable = made_in(strategy)
    with strategy.scope():
        update(variable)


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (
            forgotten_scope,
            r"variable 'kernel\w*' was not created in the scope of <MirroredStrategy, replica . of 2, .*>; "
            r"create it inside `with strategy.scope\(\):`",
        ),
        (two_strategies, "Mixing different tf.distribute.Strategy objects: variable 'kernel'"),
        (another_kind_of_strategy, "Mixing different tf.distribute.Strategy objects.*OneDeviceStrategy"),
        (outside_of_run, "sums over 2 replicas and was called outside of a replica"),
        (in_the_scope_only, "sums over 2 replicas and was called outside of a replica"),
    ],
)
def test_what_is_said(fn, message):
    with pytest.raises(RuntimeError, match=message) as raised:
        run_ranks(2, fn)
    assert set(raised.value.rank_errors) == {0, 1}


def test_one_replica_has_nothing_to_sum():
    variable = Variable(numpy.zeros(2))
    OneDeviceStrategy("/cpu:0").run(update, (variable,))
    assert variable.value.tolist() == [-1, -1]
