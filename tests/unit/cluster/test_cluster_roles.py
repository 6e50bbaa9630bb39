"""Roles: who is chief, who trains together, and the list that gives ranks their roles."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpidist.cluster import roles
from mpidist.cluster.spec import ClusterSpec, Task

SPEC = ClusterSpec({"chief": ["z:1"], "worker": ["a:1", "b:1"], "ps": ["c:1"], "evaluator": ["e:1"]})
NO_CHIEF = ClusterSpec({"worker": ["a:1", "b:1"], "ps": ["c:1"]})


@pytest.mark.parametrize(
    ("spec", "task", "chief"),
    [
        (SPEC, ("chief", 0), True),
        (SPEC, ("worker", 0), False),
        (SPEC, ("evaluator", 0), True),
        (SPEC, ("ps", 0), False),
        (NO_CHIEF, ("worker", 0), True),
        (NO_CHIEF, ("worker", 1), False),
        (NO_CHIEF, ("ps", 0), False),
        (NO_CHIEF, ("evaluator", 0), True),
        (ClusterSpec({}), (None, None), True),
    ],
)
def test_is_chief(spec: ClusterSpec, task: tuple[str | None, int | None], chief: bool) -> None:
    assert roles.is_chief(spec, *task) is chief


@pytest.mark.parametrize("chiefs", [0, 1])
@pytest.mark.parametrize("workers", [1, 2, 5])
def test_chief_and_workers_train_together(chiefs: int, workers: int) -> None:
    spec = ClusterSpec({"chief": ["c"] * chiefs, "worker": ["w"] * workers} if chiefs else {"worker": ["w"] * workers})
    tasks = [("chief", index) for index in range(chiefs)] + [("worker", index) for index in range(workers)]
    assert roles.worker_count(spec, "worker") == chiefs + workers
    assert sum(roles.is_chief(spec, *task) for task in tasks) == 1


def test_evaluator_is_by_itself() -> None:
    for spec in (SPEC, NO_CHIEF):
        assert roles.worker_count(spec, "evaluator") == 1


def test_ps_is_not_among_workers() -> None:
    with pytest.raises(ValueError, match="a ps has no place among the workers"):
        roles.worker_count(SPEC, "ps")


@pytest.mark.parametrize(
    ("cluster", "task", "says"),
    [
        ({"boss": ["a"]}, (None, None), "unknown jobs 'boss'; known are chief, worker, ps, evaluator"),
        ({"worker": ["a"]}, ("boss", 0), "unknown task type 'boss'; it is one of chief"),
        ({"worker": ["a"]}, ("chief", 0), "'chief' is not in the cluster; its jobs are 'worker'"),
        ({"worker": ["a"]}, ("worker", 1), "no worker 1: the cluster has 1"),
        ({"worker": ["a"]}, ("worker", -1), "no worker -1"),
        ({"worker": ["a"]}, ("worker", None), "no worker None"),
        ({"chief": ["a", "b"]}, ("chief", 0), "at most one chief, got 2"),
        ({"worker": ["c"], "evaluator": ["a", "b"]}, ("worker", 0), "at most one evaluator, got 2"),
    ],
)
def test_what_is_no_task(cluster: dict[str, list[str]], task: tuple[str | None, int | None], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        roles.validate(ClusterSpec(cluster), *task)


def test_parse_roles() -> None:
    workers = tuple(Task("worker", index) for index in range(5))
    expected = (Task("chief", 0), *workers, Task("ps", 0), Task("ps", 1))
    for text in ("chief:1,worker:5,ps:2", "chief,worker:*,ps:2", " chief : 1 , worker : * , ps : 2 "):
        assert roles.parse_roles(text, 8) == expected
    assert roles.parse_roles("worker:*", 5) == workers
    assert roles.parse_roles("worker:2,ps,worker:3", 6) == (*workers[:2], Task("ps", 0), *workers[2:])
    assert roles.parse_roles("worker:5,ps:*", 5) == workers


@given(st.lists(st.sampled_from(["worker", "ps"]), min_size=1), st.booleans(), st.booleans())
def test_roles_round_trip(middle: list[str], chief: bool, evaluator: bool) -> None:
    given_roles = ["chief"] * chief + middle + ["evaluator"] * evaluator
    tasks = roles.parse_roles(",".join(f"{role}:1" for role in given_roles), len(given_roles))
    assert [task.type for task in tasks] == given_roles
    assert [task.index for task in tasks] == [given_roles[:rank].count(role) for rank, role in enumerate(given_roles)]
    assert tasks == roles.number_roles(given_roles)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("worker:3", "are for 3 ranks, but there are 4"),
        ("worker:5", "are for 5 ranks, but there are 4"),
        ("worker:5,ps:*", "are for 5 ranks, but there are 4"),
        ("worker:*,ps:*", "only one role can take the ranks that are left .*, got 2"),
        ("boss:4", "unknown role 'boss'; it is one of chief, worker, ps, evaluator"),
        ("", "unknown role ''"),
        ("worker:x", "expected role:number or role:\\*, got 'worker:x'"),
        ("worker:-4", "got 'worker:-4'"),
        ("worker:", "got 'worker:'"),
        ("chief:2,worker:2", "at most one chief, got 2"),
        ("evaluator:2,worker:2", "at most one evaluator, got 2"),
    ],
)
def test_unreadable_roles(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        roles.parse_roles(text, 4)
