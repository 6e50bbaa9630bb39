"""TensorFlow's observed cases of topic ``gather``, each at its number of ranks."""

from __future__ import annotations

from typing import Any

import numpy
import pytest

from mpidist import context
from mpidist.strategies.mirrored import MirroredStrategy
from mpidist.strategies.one_device import OneDeviceStrategy
from mpidist.variables import IndexedSlices
from tests.oracle.cases import cases
from tests.oracle.deviations import DEVIATIONS
from tests.unit.oracle.table import Check, assert_value, observe_on_ranks

CASES = cases("gather")


def gathered(given: dict[str, Any]) -> Any:
    strategy = MirroredStrategy()
    return strategy.gather(numpy.array(given["per_replica"][strategy.extended.replica_id]), axis=given["axis"])


def gathered_in_replica(given: dict[str, Any]) -> Any:
    def fn() -> Any:
        replica = context.get_replica_context()
        value = numpy.array(given["per_replica"][replica.replica_id_in_sync_group])
        return replica.all_gather(value, axis=given["axis"])

    return MirroredStrategy().run(fn)


def inside_run(given: dict[str, Any]) -> None:
    strategy = MirroredStrategy()
    strategy.run(lambda: strategy.gather(numpy.ones(1), axis=0))


def merged(given: dict[str, Any]) -> Any:
    def fn() -> Any:
        replica = context.get_replica_context()
        value = numpy.array([5 + replica.replica_id_in_sync_group])
        return replica.merge_call(lambda strategy, mine: strategy.gather(mine, axis=0), args=(value,))

    return MirroredStrategy().run(fn)


def some_merge_calls(given: dict[str, Any]) -> None:
    strategy = MirroredStrategy()

    def fn() -> None:
        if context.get_replica_context().replica_id_in_sync_group == 0:
            context.get_replica_context().merge_call(lambda strategy: None)

    strategy.run(fn)
    strategy.reduce("SUM", 1.0, axis=None)  # the next call, in which it is found


def rows(given: dict[str, Any]) -> None:
    MirroredStrategy().gather(IndexedSlices([1.0], [0], (2,)), axis=0)


CHECKS: dict[str, Check] = {
    name: (case["input"]["replicas"], gathered_in_replica if name.startswith("all_gather") else gathered)
    for name, case in CASES.items()
    if "per_replica" in case["input"]
} | {
    "gather_in_replica_ctx": (2, inside_run),
    "gather_one_device": (1, lambda given: OneDeviceStrategy("CPU:0").gather(given["value"], axis=0)),
    "gather_default": (1, lambda given: context.get_strategy().gather(given["value"], axis=0)),
    "merge_call_sees_all": (2, merged),
    "merge_call_uneven": (2, some_merge_calls),
    "gather_indexed_slices": (2, rows),
}


@pytest.mark.parametrize("name", CHECKS)
def test_gathers_as_tensorflow_does(name):
    expected = CASES[name]["expected"]
    if name.startswith("all_gather") and isinstance(expected, list):
        assert expected[0] == expected[1]
        expected = expected[0]
    for value in observe_on_ranks(CASES[name], CHECKS[name]):
        assert_value(value, expected)


def test_no_case_is_forgotten():
    assert CASES.keys() == CHECKS.keys() | (CASES.keys() & DEVIATIONS.keys())
