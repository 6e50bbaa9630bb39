"""TensorFlow's observed cases of topic ``multi_worker`` that are not about input, each on two ranks."""

from __future__ import annotations

from typing import Any

import numpy
import pytest

from mpidist.strategies.multi_worker_mirrored import MultiWorkerMirroredStrategy
from mpidist.testing import run_ranks
from mpidist.variables import Variable
from tests.oracle.cases import cases
from tests.oracle.deviations import DEVIATIONS

CASES = cases("multi_worker")


def properties() -> list[Any]:
    strategy = MultiWorkerMirroredStrategy()
    resolver = strategy.cluster_resolver
    assert resolver is not None
    return [strategy.num_replicas_in_sync, resolver.task_type, resolver.task_id]


def gathered() -> list[float]:
    strategy = MultiWorkerMirroredStrategy()
    values = [[1.0, 2.0, 3.0], [10.0]][strategy.extended.replica_id]
    return strategy.gather(numpy.array(values), axis=0).tolist()


def initial_value() -> float:
    with MultiWorkerMirroredStrategy().scope() as strategy:
        return float(Variable(100.0 + strategy.cluster_resolver.task_id).value)


CHECKS = {
    "mwms_props": properties,
    "mwms_gather_uneven": gathered,
    "mwms_var_init_broadcast": initial_value,
}


@pytest.mark.parametrize("name", CHECKS)
def test_workers_see_what_tensorflows_see(name):
    assert run_ranks(2, CHECKS[name]) == CASES[name]["expected"]


def test_no_case_is_forgotten():
    input_cases = {name for name in CASES if name.startswith(("mwms_dataset_", "mwms_from_function"))}
    assert CASES.keys() == CHECKS.keys() | input_cases | (CASES.keys() & DEVIATIONS.keys())
