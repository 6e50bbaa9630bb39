"""What `TF_CONFIG`, `ClusterSpec` and the functions of roles refuse, by name."""

from __future__ import annotations

import json

import pytest

from mpidist.cluster import roles
from mpidist.cluster.resolvers.tf_config import TFConfigClusterResolver
from mpidist.cluster.spec import ClusterSpec

CLUSTER = {"worker": ["a:1", "b:2"]}
SPEC = ClusterSpec(CLUSTER)


@pytest.mark.parametrize("index", ["one", "", 1.7, True, -1, [], {}])
def test_an_index_that_is_no_whole_number_is_quoted(index):
    text = json.dumps({"cluster": CLUSTER, "task": {"type": "worker", "index": index}})
    with pytest.raises(ValueError) as caught:
        _ = TFConfigClusterResolver(environ={"TF_CONFIG": text}).task_id
    assert "TF_CONFIG" in str(caught.value) and "index" in str(caught.value) and repr(index) in str(caught.value)


@pytest.mark.parametrize("kind", [3, ["worker"], {}, True])
def test_a_type_of_a_task_that_is_no_text_is_quoted(kind):
    text = json.dumps({"cluster": CLUSTER, "task": {"type": kind, "index": 0}})
    with pytest.raises(ValueError, match="TF_CONFIG.*type") as caught:
        _ = TFConfigClusterResolver(environ={"TF_CONFIG": text}).task_type
    assert repr(kind) in str(caught.value)


@pytest.mark.parametrize(("kind", "index"), [("worker", 2), ("nosuch", 0), ("", 0)])
def test_a_task_that_the_cluster_has_not_is_quoted(kind, index):
    text = json.dumps({"cluster": CLUSTER, "task": {"type": kind, "index": index}})
    with pytest.raises(ValueError, match=f"TF_CONFIG: no .*{index if kind == 'worker' else repr(kind)}"):
        TFConfigClusterResolver(environ={"TF_CONFIG": text}).master()


@pytest.mark.parametrize("text", ["", "'{}'", "{", "one", '"one"', '{"task": 1}', '{"task": "x"}'])
def test_a_text_that_cannot_be_read_is_quoted(text):
    with pytest.raises(ValueError, match="TF_CONFIG"):
        _ = TFConfigClusterResolver(environ={"TF_CONFIG": text}).task_type


def test_the_quotes_of_a_shell_are_named():
    with pytest.raises(ValueError, match="quotes of the shell"):
        TFConfigClusterResolver(environ={"TF_CONFIG": "'{}'"}).cluster_spec()


@pytest.mark.parametrize("cluster", [["a"], {"worker": 3}, {"worker": {"1.5": "a"}}, {"worker": {"": "a"}}])
def test_a_cluster_that_cannot_be_read_is_quoted(cluster):
    with pytest.raises((TypeError, ValueError), match="TF_CONFIG cannot be read: its cluster"):
        TFConfigClusterResolver(environ={"TF_CONFIG": json.dumps({"cluster": cluster})}).cluster_spec()


def test_a_name_of_a_job_that_is_no_text():
    with pytest.raises(TypeError, match="names of jobs must be strings, got None"):
        ClusterSpec({None: ["a:1"]})


@pytest.mark.parametrize("name", [None, [], {}, 3])
def test_no_name_of_a_job(name):
    for fn in (SPEC.num_tasks, SPEC.task_indices, SPEC.job_tasks, lambda job: SPEC.task_address(job, 0)):
        with pytest.raises(ValueError, match="no job"):
            fn(name)


@pytest.mark.parametrize("index", [None, [], "0", 1.0, True])
def test_no_index_of_a_task(index):
    with pytest.raises(ValueError, match="no task"):
        SPEC.task_address("worker", index)
    with pytest.raises(ValueError, match="there is no worker"):
        roles.is_chief(SPEC, "worker", index)


def test_roles_of_nothing():
    with pytest.raises(ValueError, match="task type is None"):
        roles.worker_count(SPEC, None)
