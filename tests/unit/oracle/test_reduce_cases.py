"""TensorFlow's observed cases of topic ``reduce``, each at its number of ranks."""

from __future__ import annotations

from typing import Any

import numpy
import pytest

from mpidist import context
from mpidist.cross_device_ops import CrossDeviceOps, NcclAllReduce, ReductionToOneDevice
from mpidist.options import CommunicationImplementation, CommunicationOptions, ReduceOp, VariableAggregation
from mpidist.strategies.mirrored import MirroredStrategy
from mpidist.strategies.one_device import OneDeviceStrategy
from mpidist.variables import IndexedSlices
from tests.oracle.cases import cases
from tests.oracle.deviations import DEVIATIONS
from tests.unit.oracle.table import Check, assert_value, observe_on_ranks

CASES = cases("reduce")


def mine(given: dict[str, Any]) -> numpy.ndarray:
    """Return this rank's component of the case's value."""
    rank = MirroredStrategy().extended.replica_id
    return numpy.array(given["per_replica"][rank], dtype=given.get("dtype", "float32"))


def reduced(given: dict[str, Any]) -> Any:
    axis = tuple(given["axis"]) if isinstance(given["axis"], list) else given["axis"]
    return MirroredStrategy().reduce(given["op"], mine(given), axis=axis)


def in_replica(given: dict[str, Any], op: str, value: Any) -> Any:
    return MirroredStrategy().run(lambda: context.get_replica_context().all_reduce(op, value))


def nested(given: dict[str, Any]) -> Any:
    i = numpy.float32(MirroredStrategy().extended.replica_id)
    return in_replica(given, "SUM", {"a": i + 1, "b": [i, 10 * i]})


def gradient_of_mean(given: dict[str, Any]) -> float:
    """The gradient of an all-mean is the all-mean of the gradients that come in: here ones, times that of x * x."""
    x = given["x"][MirroredStrategy().extended.replica_id]
    return float(in_replica(given, "MEAN", numpy.float32(1)) * 2 * x)


def rows(given: dict[str, Any], op: str) -> Any:
    r = MirroredStrategy().extended.replica_id
    values = numpy.array([[1, 1], [2, 2]], "float32") * (r + 1)
    return in_replica(given, op, IndexedSlices(values, [r, 2], (4, 2))).to_dense()


def direct(given: dict[str, Any]) -> Any:
    ops = ReductionToOneDevice()
    ops.bind(MirroredStrategy().extended.communicator)
    return ops.reduce(ReduceOp.SUM, mine(given), destinations=mine(given))


def without_implementation(given: dict[str, Any]) -> None:
    strategy = MirroredStrategy(cross_device_ops=CrossDeviceOps())
    strategy.run(lambda: context.get_replica_context().all_reduce("SUM", [numpy.ones(2), numpy.ones(3)]))


def options_fields(given: dict[str, Any]) -> dict[str, str]:
    options = CommunicationOptions()
    return {name: str(getattr(options, name)) for name in ("bytes_per_pack", "timeout_seconds", "implementation")}


def float32(given: dict[str, Any]) -> numpy.ndarray:
    return numpy.float32(given["value"])


#: Cases whose whole question is in their input: operation, value and axis.
CHECKS: dict[str, Check] = {
    name: (case["input"]["replicas"], reduced)
    for name, case in CASES.items()
    if "op" in case["input"] and name != "reduce_bad_op_string"
} | {
    "reduce_plain_tensor_mean": (2, lambda given: MirroredStrategy().reduce("MEAN", float32(given), axis=None)),
    "reduce_plain_zero_sum": (2, lambda given: MirroredStrategy().reduce("SUM", float32(given), axis=None)),
    "reduce_plain_tensor_sum_axis0": (2, lambda given: MirroredStrategy().reduce("SUM", float32(given), axis=0)),
    "reduce_default_strategy": (1, lambda given: context.get_strategy().reduce("SUM", given["value"], axis=None)),
    "reduce_default_strategy_axis0": (1, lambda given: context.get_strategy().reduce("MEAN", given["value"], axis=0)),
    "reduce_one_device": (1, lambda given: OneDeviceStrategy("CPU:0").reduce("SUM", given["value"], axis=None)),
    "reduce_variable_aggregation_as_op_axis0": (
        2,
        lambda given: MirroredStrategy().reduce(VariableAggregation.SUM, numpy.ones(2), axis=0),
    ),
    "reduce_to_device": (2, lambda given: MirroredStrategy().extended.reduce_to("SUM", mine(given), "CPU:0")),
    "reduce_to_all": (2, lambda given: MirroredStrategy().extended.reduce_to("MEAN", mine(given), mine(given))),
    "all_reduce_mean4": (4, lambda given: in_replica(given, "mean", mine(given))),
    "all_reduce_shape_mismatch": (2, lambda given: in_replica(given, "SUM", mine(given))),
    "all_reduce_nested": (2, nested),
    "all_reduce_gradient_mean": (2, gradient_of_mean),
    "all_reduce_indexed_slices_sum": (2, lambda given: rows(given, "SUM")),
    "all_reduce_indexed_slices_mean": (2, lambda given: rows(given, "MEAN")),
    "cross_device_ops_num_packs_negative": (1, lambda given: NcclAllReduce(num_packs=-1)),
    "cross_device_ops_reduce_direct": (2, direct),
    "cross_device_ops_subclass_unimplemented": (2, without_implementation),
    "comm_options_defaults": (1, options_fields),
    "comm_impl_enum": (1, lambda given: [member.name for member in CommunicationImplementation]),
    "reduce_op_enum": (1, lambda given: {member.name: member.value for member in ReduceOp if member.adds}),
}

#: Cases whose expectation is a list with one entry a rank.
BY_RANK = {"reduce_to_all", "cross_device_ops_reduce_direct"} | {
    name for name in CASES if name.startswith("all_reduce_")
}


@pytest.mark.parametrize("name", CHECKS)
def test_reduces_as_tensorflow_does(name):
    expected = CASES[name]["expected"]
    for rank, value in enumerate(observe_on_ranks(CASES[name], CHECKS[name])):
        assert_value(value, expected[rank] if name in BY_RANK else expected)


def test_no_case_is_forgotten():
    assert CASES.keys() == CHECKS.keys() | (CASES.keys() & DEVIATIONS.keys())
