"""`ClusterSpec`: a value with TensorFlow's meaning."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpidist.cluster.spec import ClusterSpec, Task

JOBS = st.sampled_from(["chief", "worker", "ps", "evaluator"])
TASKS = st.dictionaries(st.integers(0, 9), st.text(min_size=1), max_size=6)


def test_lists_and_sparse_jobs() -> None:
    spec = ClusterSpec({"worker": ["a:1", "b:1"], "ps": {3: "d:1", 1: "b:2"}})
    assert spec.jobs == ["worker", "ps"]
    assert spec.as_dict() == {"worker": ["a:1", "b:1"], "ps": {1: "b:2", 3: "d:1"}}
    assert [spec.num_tasks(job) for job in spec.jobs] == [2, 2]
    assert [spec.task_indices(job) for job in spec.jobs] == [[0, 1], [1, 3]]
    assert spec.task_address("ps", 3) == "d:1"
    assert spec.job_tasks("worker") == ["a:1", "b:1"]
    assert spec.job_tasks("ps") == [None, "b:2", None, "d:1"]


@given(st.dictionaries(JOBS, TASKS))
def test_equal_in_every_form(cluster: dict[str, dict[int, str]]) -> None:
    spec = ClusterSpec(cluster)
    backwards = {job: dict(reversed(tasks.items())) for job, tasks in reversed(cluster.items())}
    text_keys: Any = {job: {str(index): address for index, address in tasks.items()} for job, tasks in cluster.items()}
    for same in (ClusterSpec(spec), ClusterSpec(spec.as_dict()), ClusterSpec(backwards), ClusterSpec(text_keys)):
        assert same == spec and hash(same) == hash(spec)
    assert bool(spec) == bool(cluster)
    for job, tasks in cluster.items():
        listed = spec.job_tasks(job)
        assert {index: address for index, address in enumerate(listed) if address is not None} == tasks
        dense = sorted(tasks) == list(range(len(tasks)))
        assert spec.as_dict()[job] == (listed if dense else tasks)


def test_a_copy_does_not_follow_its_source() -> None:
    workers = ["a:1"]
    spec = ClusterSpec({"worker": workers})
    workers.append("b:1")
    tasks = spec.as_dict()["worker"]
    assert isinstance(tasks, list)
    tasks.append("c:1")
    assert spec.as_dict() == {"worker": ["a:1"]}


def test_differs_from_other_clusters_and_things() -> None:
    spec = ClusterSpec({"worker": ["a:1"]})
    assert spec != ClusterSpec({"worker": ["b:1"]})
    assert spec != ClusterSpec({"ps": ["a:1"]})
    assert spec != {"worker": ["a:1"]}
    assert repr(spec) == "ClusterSpec({'worker': ['a:1']})"


@pytest.mark.parametrize(
    ("cluster", "error", "says"),
    [
        (["a:1"], TypeError, "must map job names"),
        ("worker", TypeError, "must map job names"),
        ({"worker": "a:1"}, TypeError, "job 'worker' must be a list of addresses or a mapping"),
        ({"worker": 3}, TypeError, "got 3"),
        ({"worker": ["a:1", 2]}, TypeError, "address of task 1 of job 'worker' must be a string, got 2"),
        ({"worker": {-1: "a:1"}}, ValueError, "integers of 0 or more, got -1"),
        ({"worker": {"x": "a:1"}}, ValueError, "x"),
        ({"worker": {1.5: "a:1"}}, ValueError, "got 1.5"),
    ],
)
def test_what_is_no_cluster(cluster: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        ClusterSpec(cluster)


def test_unknown_jobs_and_tasks_list_the_known_ones() -> None:
    spec = ClusterSpec({"worker": {1: "b:1", 3: "d:1"}})
    for ask in (spec.num_tasks, spec.task_indices, spec.job_tasks, lambda job: spec.task_address(job, 0)):
        with pytest.raises(ValueError, match="no job 'ps' in the cluster; its jobs are 'worker'"):
            ask("ps")
    with pytest.raises(ValueError, match="no task 2 in job 'worker'; its tasks are 1, 3"):
        spec.task_address("worker", 2)


def test_task_is_a_value() -> None:
    assert Task("worker", 1) == Task("worker", 1) != Task("worker", 2)
    assert str(Task("ps", 0)) == "ps 0"
    assert len({Task("ps", 0), Task("ps", 0)}) == 1
