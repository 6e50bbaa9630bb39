"""TensorFlow's observed cases of topic ``variables``, each at its number of ranks.

Those of a single write, with all contexts and aggregations, are in ``tests/unit/test_variables.py``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import pytest

from mpidist import context
from mpidist.options import VariableAggregation, VariableSynchronization
from mpidist.strategies.central_storage import CentralStorageStrategy
from mpidist.strategies.mirrored import MirroredStrategy
from mpidist.testing import run_ranks
from mpidist.training.checkpoint import Checkpoint
from mpidist.variables import DistributedVariable, IndexedSlices, Variable
from tests.oracle.cases import cases
from tests.oracle.deviations import DEVIATIONS
from tests.unit.oracle.table import Check, assert_value, observe_on_ranks

CASES = cases("variables")

#: Cases of things that do not exist yet.

#: Cases of one write, by what their input has.
WRITES = {name for name, case in CASES.items() if {"op", "context"} <= case["input"].keys()}

CHECKPOINTS = {name for name in CASES if name.startswith("ckpt_on_read_")}


def looked_at(strategy: Any, variable: DistributedVariable) -> dict[str, Any]:
    """Return this rank's copy and what it reads, as a case lists them for all replicas."""
    return {
        "components": variable.storage.tolist(),
        "read_in_replica": strategy.run(lambda: variable.value.tolist()),
        "read_cross_replica": variable.value.tolist(),
    }


def in_scope(given: dict[str, Any], fn: Any) -> Any:
    with MirroredStrategy().scope() as strategy:
        return fn(strategy)


def defaults(given: dict[str, Any]) -> dict[str, Any]:
    def fn(strategy: Any) -> dict[str, Any]:
        variables = {"default": Variable(1.0), "on_read": Variable(1.0, synchronization="ON_READ", aggregation="SUM")}
        return {
            name: [each.trainable, str(each.synchronization), each.aggregation.name] for name, each in variables.items()
        }

    return in_scope(given, fn)


def cross_assign_of_integers(given: dict[str, Any]) -> dict[str, Any]:
    def fn(strategy: Any) -> dict[str, Any]:
        variable = Variable(0, dtype=given["dtype"], synchronization="ON_READ", aggregation="SUM")
        return looked_at(strategy, variable.assign(given["value"]))

    return in_scope(given, fn)


def random_initial_value(given: dict[str, Any]) -> bool:
    def fn(strategy: Any) -> bool:
        variable = Variable(lambda: numpy.random.default_rng(strategy.extended.replica_id).standard_normal(5))
        everybodys = strategy.gather(variable.value[None], axis=0)
        return bool((everybodys == everybodys[0]).all())

    return in_scope(given, fn)


def update_in_replica(given: dict[str, Any]) -> None:
    def fn(strategy: Any) -> None:
        variable = Variable(1.0)
        strategy.run(lambda: strategy.extended.update(variable, lambda v: v.assign_add(1.0)))
        assert variable.value == 2

    return in_scope(given, fn)


def colocated_with_a_foreign_one(given: dict[str, Any]) -> None:
    foreign = Variable(1.0)
    in_scope(given, lambda strategy: strategy.extended.colocate_vars_with(foreign).__enter__())


def scattered(given: dict[str, Any], verb: str) -> dict[str, Any]:
    def fn(strategy: Any) -> dict[str, Any]:
        variable = Variable(numpy.zeros(3, "float32"), aggregation="SUM")
        i = strategy.extended.replica_id
        strategy.run(lambda: getattr(variable, verb)(IndexedSlices([i + 1.0], [i])))
        return looked_at(strategy, variable)

    return in_scope(given, fn)


def central_storage(given: dict[str, Any]) -> dict[str, Any]:
    """Return what became of 10 when replica i added i + 1, by each aggregation."""
    strategy, seen = CentralStorageStrategy(), {}
    for aggregation in ("sum", "mean"):
        with strategy.scope():
            variable = Variable(10.0, aggregation=aggregation.upper())
        strategy.run(lambda v=variable: v.assign_add(strategy.extended.replica_id + 1.0))
        seen[aggregation] = float(variable.value)
    copies = strategy.experimental_local_results(variable)
    return {
        "class": type(variable).__name__,
        "n_copies": len(copies),
        "replicas": strategy.num_replicas_in_sync,
        **seen,
    }


CHECKS: dict[str, Check] = {
    "central_storage_update": (2, central_storage),
    "var_int_mean_ctor": (2, lambda given: in_scope(given, lambda _: Variable(0, dtype="int32", aggregation="MEAN"))),
    "var_int_sum_on_read_cross_assign": (2, cross_assign_of_integers),
    "var_sync_none": (2, lambda given: in_scope(given, lambda _: Variable(0.0, synchronization="NONE"))),
    "var_defaults": (2, defaults),
    "var_random_initializer_equal": (2, random_initial_value),
    "extended_update_in_replica_ctx": (2, update_in_replica),
    "colocate_foreign_variable": (2, colocated_with_a_foreign_one),
    "var_scatter_add_sum": (2, lambda given: scattered(given, "scatter_add")),
    "var_scatter_max_sum": (2, lambda given: scattered(given, "scatter_max")),
    "aggregation_enum": (1, lambda given: {member.name: member.value for member in VariableAggregation}),
    "synchronization_enum": (1, lambda given: {member.name: member.value for member in VariableSynchronization}),
}


@pytest.mark.parametrize("name", CHECKS)
def test_variables_are_tensorflows(name):
    expected = CASES[name]["expected"]
    if name == "var_defaults":  # the last entry is the name of a class of TensorFlow's
        expected = {key: [*fields[:2], fields[2].rpartition(".")[2]] for key, fields in expected.items()}
    for rank, observed in enumerate(observe_on_ranks(CASES[name], CHECKS[name])):
        if isinstance(expected, dict) and "components" in expected:
            alike = {"read_cross_replica": expected["read_cross_replica"]}
            assert observed == {key: values[rank] for key, values in expected.items() if key not in alike} | alike
        else:
            assert_value(observed, expected)


@pytest.mark.parametrize("name", sorted(CHECKPOINTS))
def test_copies_that_differ_are_saved_as_their_aggregate(name, tmp_path):
    expected = CASES[name]["expected"]

    def variable_of(strategy: Any) -> DistributedVariable:
        return Variable(0.0, synchronization="ON_READ", aggregation=CASES[name]["input"]["aggregation"])

    def save(path: Path) -> None:
        with MirroredStrategy().scope() as strategy:
            variable = variable_of(strategy)
        strategy.run(lambda: variable.assign(context.get_replica_context().replica_id_in_sync_group + 1.0))
        Checkpoint(v=variable).save(path)

    def restore(path: Path) -> dict[str, Any]:
        with MirroredStrategy().scope() as strategy:
            variable = variable_of(strategy)
        Checkpoint(v=variable).restore(path)
        return looked_at(strategy, variable)

    def plain(path: Path) -> float:
        variable = Variable(0.0)
        Checkpoint(v=variable).restore(path)
        return float(variable)

    run_ranks(2, save, tmp_path / "checkpoint.h5")
    assert plain(tmp_path / "checkpoint.h5") == expected["in_checkpoint"]
    for rank, seen in enumerate(run_ranks(4, restore, tmp_path / "checkpoint.h5")):
        assert seen["components"] == expected["restored"]["components"][rank]
        assert seen["read_in_replica"] == expected["restored"]["read_in_replica"][rank]
        assert seen["read_cross_replica"] == expected["restored"]["read_cross_replica"]


def test_a_mirrored_variable_is_saved_once_and_restores_into_a_plain_one(tmp_path):
    expected = CASES["ckpt_mirrored_to_plain"]["expected"]

    def save() -> None:
        with MirroredStrategy().scope():
            variable = Variable(7.0)
        Checkpoint(v=variable).save(tmp_path / "checkpoint.h5")

    run_ranks(2, save)
    plain = Variable(0.0)
    Checkpoint(v=plain).restore(tmp_path / "checkpoint.h5")
    assert plain.value == expected["plain_restored"]


def test_no_case_is_forgotten():
    elsewhere = WRITES | CHECKPOINTS | {"ckpt_mirrored_to_plain"}
    assert CASES.keys() == CHECKS.keys() | elsewhere | (CASES.keys() & DEVIATIONS.keys())
    assert not CHECKS.keys() & elsewhere
