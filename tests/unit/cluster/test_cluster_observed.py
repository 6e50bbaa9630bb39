"""TensorFlow's observed cases of the topics tf_config and slurm.

Every case of both topics is named in a table below; what differs on purpose is in ``tests/oracle/deviations.py``.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from mpidist.cluster import roles
from mpidist.cluster.hostlist import expand_hostlist, expand_tasks_per_node
from mpidist.cluster.resolvers.base import ClusterResolver
from mpidist.cluster.resolvers.simple import SimpleClusterResolver
from mpidist.cluster.resolvers.slurm import SlurmClusterResolver
from mpidist.cluster.resolvers.tf_config import TFConfigClusterResolver
from mpidist.cluster.resolvers.union import UnionResolver
from mpidist.cluster.spec import ClusterSpec
from tests.oracle.cases import cases, exception
from tests.oracle.deviations import DEVIATIONS

TF_CONFIG = cases("tf_config")
SLURM = cases("slurm")
WORKERS = {"worker": ["a:1", "b:1"]}
SPARSE = {"worker": {"1": "b:1", "3": "d:1"}}


def _config(text: str | None, **arguments: Any) -> TFConfigClusterResolver:
    return TFConfigClusterResolver(environ={} if text is None else {"TF_CONFIG": text}, **arguments)


def _told(resolver: ClusterResolver) -> dict[str, Any]:
    return {
        "cluster": resolver.cluster_spec().as_dict(),
        "task_type": resolver.task_type,
        "task_id": resolver.task_id,
        "rpc_layer": resolver.rpc_layer,
        "master": resolver.master(),
        "environment": resolver.environment,
    }


def _no_task() -> dict[str, Any]:
    resolver = _config(json.dumps(TF_CONFIG["tfconfig_no_task"]["input"]))
    return {"t": resolver.task_type, "i": resolver.task_id, "c": resolver.cluster_spec().as_dict()}


def _override() -> list[Any]:
    config = {
        "cluster": {"worker": ["host1:1111"], "ps": ["host4:1111"]},
        "task": {"type": "worker", "index": 1},
        "rpc_layer": "grpc",
        "environment": "cloud",
    }
    resolver = _config(json.dumps(config), task_type="ps", task_id=0, rpc_layer="http", environment="google")
    return [resolver.task_type, resolver.task_id, resolver.rpc_layer, resolver.environment, resolver.master()]


def _sparse_spec() -> dict[str, Any]:
    spec = ClusterSpec(SPARSE)
    return {"jobs": spec.jobs, "dict": spec.as_dict(), "bool": bool(spec)}


def _union(*resolvers: tuple[dict[str, Any], str]) -> UnionResolver:
    given = enumerate(resolvers)
    return UnionResolver(
        *(SimpleClusterResolver(ClusterSpec(cluster), master, "worker", place) for place, (cluster, master) in given)
    )


def _union_task() -> list[Any]:
    union = _union((WORKERS, "m1"), (WORKERS, "m2"))
    return [union.task_type, union.task_id, union.master(), union.environment]


_SESSION = {"cluster": WORKERS, "task": {"type": "worker", "index": 1}, "session_master": "sm:9"}

#: Case of topic tf_config -> the same asked of mpidist.
ASKED: dict[str, Callable[[], Any]] = {
    "tfconfig_unset": lambda: _told(_config(None)),
    "tfconfig_empty_obj": lambda: _told(_config("{}")),
    "tfconfig_bad_json": lambda: _config("{bad").cluster_spec(),
    "tfconfig_no_task": _no_task,
    "tfconfig_bad_index": lambda: _config('{"task": {"type": "worker", "index": "x"}}').task_id,
    "tfconfig_session_master": lambda: _told(_config(json.dumps(_SESSION))),
    "tfconfig_override": _override,
    "tfconfig_dict_job": lambda: _config(json.dumps({"cluster": SPARSE})).cluster_spec().as_dict(),
    "cluster_spec_sparse": _sparse_spec,
    "cluster_spec_bad_value": lambda: ClusterSpec({"worker": "a:1"}),
    "cluster_spec_unknown_job": lambda: ClusterSpec(WORKERS).num_tasks("x"),
    "cluster_spec_eq": lambda: ClusterSpec(WORKERS) == ClusterSpec({"worker": {0: "a:1", 1: "b:1"}}),
    "simple_resolver_bad": lambda: SimpleClusterResolver(WORKERS),  # type: ignore[arg-type]
    "union_dict_merge": lambda: (
        _union(*(({"worker": at}, "") for at in ({1: "a:1"}, {3: "b:1"}))).cluster_spec().as_dict()
    ),
    "union_task_type": _union_task,
    "union_first_empty_master": lambda: _union((WORKERS, ""), (WORKERS, "m2")).master(),
    "union_bad_arg": lambda: UnionResolver("x"),  # type: ignore[arg-type]
}

#: The rules of roles are a family of cases of one form.
RULES = [name for name in TF_CONFIG if name.startswith("cluster_rules_")]
RULE_FNS: dict[str, Callable[[ClusterSpec, str, int], Any]] = {
    "is_chief": roles.is_chief,
    "worker_count": lambda spec, task_type, _: roles.worker_count(spec, task_type),
}

HOSTLISTS = [name for name in SLURM if name.startswith("slurm_hostlist_")]
TASKS = [name for name in SLURM if name.startswith("slurm_tasks_")]
STEPS = [name for name in SLURM if name.startswith("slurm_resolver_")]
#: Cases of these families that have a test of their own below, because mpidist's answer is another one.
OTHERWISE = ("slurm_hostlist_7", "slurm_resolver_sorted_hosts", "slurm_resolver_zero_gpu_per_task")


def _check(ask: Callable[[], Any], expected: Any) -> None:
    """Compare as JSON does: its keys are strings."""
    error = exception(expected)
    if error is None:
        assert json.loads(json.dumps(ask())) == expected
        return
    with pytest.raises(error):
        ask()


def test_every_case_is_here() -> None:
    assert set(TF_CONFIG) == {*ASKED, *RULES}
    assert set(SLURM) == {*HOSTLISTS, *TASKS, *STEPS}
    assert len(RULES) + len(HOSTLISTS) + len(TASKS) + len(STEPS) + len(ASKED) == len(TF_CONFIG) + len(SLURM)


@pytest.mark.parametrize("name", ASKED)
def test_tf_config(name: str) -> None:
    _check(ASKED[name], TF_CONFIG[name]["expected"])


@pytest.mark.parametrize("rule", RULE_FNS)
@pytest.mark.parametrize("name", RULES)
def test_cluster_rules(name: str, rule: str) -> None:
    case = TF_CONFIG[name]["input"]
    spec = ClusterSpec(case["cluster"])
    _check(lambda: RULE_FNS[rule](spec, case["task_type"], case["task_id"]), TF_CONFIG[name]["expected"][rule])


@pytest.mark.parametrize("name", [name for name in HOSTLISTS if name not in OTHERWISE])
def test_hostlist(name: str) -> None:
    _check(lambda: expand_hostlist(SLURM[name]["input"]["hostlist"]), SLURM[name]["expected"])


@pytest.mark.parametrize("name", TASKS)
def test_tasks_per_node(name: str) -> None:
    _check(lambda: expand_tasks_per_node(SLURM[name]["input"]["tasks_per_node"]), SLURM[name]["expected"])


def _environ(name: str) -> dict[str, str]:
    return {variable: str(value) for variable, value in SLURM[name]["input"]["env"].items()}


@pytest.mark.parametrize("name", [name for name in STEPS if name not in OTHERWISE])
def test_slurm_step(name: str) -> None:
    """All that TensorFlow told, except that it knew the task only after cluster_spec(), and changed the environment."""
    expected = SLURM[name]["expected"]
    environ = _environ(name)
    if exception(expected):
        _check(lambda: SlurmClusterResolver(environ=environ, **SLURM[name]["input"]["args"]), expected)
        return
    resolver = SlurmClusterResolver(environ=environ, **SLURM[name]["input"]["args"])
    assert name in DEVIATIONS
    assert [resolver.task_type, resolver.task_id] == expected["task"]
    assert resolver.cluster_spec().as_dict() == expected["cluster"]
    assert resolver.master() == expected["master"]
    assert resolver.num_accelerators() == expected["num_accelerators"]
    assert resolver.rpc_layer == expected["rpc_layer"]
    assert ",".join(map(str, resolver.task_gpus)) == expected["CUDA_VISIBLE_DEVICES"]
    assert environ == _environ(name)


@pytest.mark.parametrize("name", [*OTHERWISE, *RULES])
def test_differences_have_a_reason(name: str) -> None:
    assert DEVIATIONS[name]


def test_several_brackets_are_expanded() -> None:
    name = "slurm_hostlist_7"
    assert exception(SLURM[name]["expected"])
    hosts = [f"x{x}y{y}" for x in (1, 2) for y in (3, 4)]
    assert expand_hostlist(SLURM[name]["input"]["hostlist"]) == hosts


def test_hosts_keep_rank_order() -> None:
    name = "slurm_resolver_sorted_hosts"
    resolver = SlurmClusterResolver(environ=_environ(name))
    assert resolver.cluster_spec().job_tasks("worker") == list(reversed(SLURM[name]["expected"]["cluster"]["worker"]))
    assert resolver.master() == "grpc://z1:8888"


def test_fewer_gpus_than_tasks() -> None:
    name = "slurm_resolver_zero_gpu_per_task"
    assert exception(SLURM[name]["expected"])
    resolver = SlurmClusterResolver(environ=_environ(name), **SLURM[name]["input"]["args"])
    assert resolver.num_accelerators() == {"GPU": 0}
    assert resolver.cluster_spec().job_tasks("worker") == ["n1:8888", "n1:8889"]
