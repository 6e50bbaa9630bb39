"""TensorFlow's observed cases of topic ``context``, each at its number of ranks."""

from __future__ import annotations

import ast
import copy
import re
from typing import Any

import pytest

from mpidist import arrays, context
from mpidist.strategies.central_storage import CentralStorageStrategy
from mpidist.strategies.default import DefaultStrategy
from mpidist.strategies.mirrored import MirroredStrategy
from mpidist.strategies.one_device import OneDeviceStrategy
from mpidist.variables import Variable
from tests.oracle.cases import cases
from tests.oracle.deviations import DEVIATIONS
from tests.unit.oracle.table import Check, assert_value, observe_on_ranks

CASES = cases("context")

#: Cases of things that do not exist yet.


def situation() -> dict[str, Any]:
    name = type(context.get_strategy()).__name__
    return {
        "has_strategy": context.has_strategy(),
        "in_cross_replica": context.in_cross_replica_context(),
        "replica_ctx": context.get_replica_context() is not None,
        "strategy": "_DefaultDistributionStrategy" if name == "DefaultStrategy" else name,
    }


def in_scopes(*strategies: Any) -> dict[str, Any]:
    if not strategies:
        return situation()
    with strategies[0].scope():
        return in_scopes(*strategies[1:])


def same_scope(given: dict[str, Any]) -> dict[str, Any]:
    strategy = MirroredStrategy()
    return in_scopes(strategy, strategy)


def run_in_run(given: dict[str, Any]) -> None:
    strategy = MirroredStrategy()
    strategy.run(lambda: strategy.run(situation))


def set_in_scope(given: dict[str, Any]) -> None:
    with MirroredStrategy().scope() as strategy:
        context.experimental_set_strategy(strategy)


def replica_id() -> int:
    return context.get_replica_context().replica_id_in_sync_group


def default_replica(given: dict[str, Any]) -> list[int]:
    return [replica_id(), context.get_replica_context().num_replicas_in_sync]


def resolvers(given: dict[str, Any]) -> list[Any]:
    strategies = (context.get_strategy(), MirroredStrategy(), OneDeviceStrategy("CPU:0"))
    return [strategy.cluster_resolver for strategy in strategies]


def default_devices(given: dict[str, Any]) -> list[Any]:
    strategy = MirroredStrategy()
    return [strategy.num_replicas_in_sync, list(strategy.extended.worker_devices)]


def both_devices(given: dict[str, Any]) -> list[list[str]]:
    extended = MirroredStrategy(["CPU:0", "CPU:1"]).extended
    return [list(extended.worker_devices), list(extended.parameter_devices)]


def on_one_device(given: dict[str, Any]) -> list[Any]:
    strategy = OneDeviceStrategy(given["device"])
    with strategy.scope():
        variable = Variable(1.0)
    doubled, devices = strategy.run(lambda: (2 * variable.value, context.get_replica_context().devices))
    (parameters,) = strategy.extended.parameter_devices
    return [parameters.rpartition("/")[2], float(doubled), devices[0].rpartition("/")[2]]


def tpu_methods(given: dict[str, Any]) -> list[bool]:
    verbs = ("assign_to", "split_to", "replicate_to")
    names = [f"experimental_{verb}_logical_device{'' if verb == 'assign_to' else 's'}" for verb in verbs]
    return [hasattr(MirroredStrategy(), name) for name in names]


CHECKS: dict[str, Check] = {
    "ctx_scope": (2, lambda given: in_scopes(MirroredStrategy())),
    "ctx_run": (2, lambda given: MirroredStrategy().run(situation)),
    "ctx_replica_ids": (2, lambda given: MirroredStrategy().run(replica_id)),
    "ctx_default_replica_id": (1, default_replica),
    "nest_same_scope": (2, same_scope),
    "run_in_run": (2, run_in_run),
    "default_scope_inside_scope": (2, lambda given: in_scopes(MirroredStrategy(), context.get_strategy())),
    "default_scope": (1, lambda given: in_scopes(context.get_strategy())),
    "default_run": (1, lambda given: context.get_strategy().run(lambda x: x + 1, args=(3,))),
    "default_second_instance": (1, lambda given: DefaultStrategy()),
    "default_local_results": (1, lambda given: list(context.get_strategy().experimental_local_results(5))),
    "default_cluster_resolver": (1, resolvers),
    "experimental_set_strategy_in_scope": (2, set_in_scope),
    "run_return_none": (2, lambda given: MirroredStrategy().run(lambda: None)),
    "copy_strategy": (2, lambda given: copy.copy(MirroredStrategy())),
    "mirrored_empty_devices": (4, lambda given: MirroredStrategy(devices=[]).num_replicas_in_sync),
    "mirrored_no_gpu_default": (4, default_devices),
    "mirrored_devices": (2, both_devices),
    "one_device_placement": (1, on_one_device),
    "tpu_methods_on_mirrored": (2, tpu_methods),
}


@pytest.fixture(autouse=True)
def no_gpus(monkeypatch):
    """The cases were recorded on a machine without GPUs."""
    monkeypatch.setattr(arrays, "list_physical_devices", lambda device_type=None: [])


@pytest.mark.parametrize("name", CHECKS)
def test_contexts_are_tensorflows(name):
    expected = CASES[name]["expected"]
    for rank, observed in enumerate(observe_on_ranks(CASES[name], CHECKS[name])):
        if name == "ctx_run":
            assert observed == ast.literal_eval(re.findall(r"\d+: ({.*})", expected)[rank])
        else:
            assert_value(observed, expected[rank] if name == "ctx_replica_ids" else expected)


def test_central_storage_without_a_gpu_has_one_replica_on_one_rank():
    strategy = CentralStorageStrategy()
    assert strategy.num_replicas_in_sync == CASES["central_ctor"]["expected"][0]


def test_no_case_is_forgotten():
    assert CASES.keys() == CHECKS.keys() | (CASES.keys() & DEVIATIONS.keys())
