"""Processes started with TF_CONFIG and without MPI are refused: each would train alone."""

import json
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import mpidist
from mpidist import transports
from mpidist.cluster.resolvers.tf_config import check_all_joined, tasks_that_train
from mpidist.errors import LaunchError
from mpidist.strategies.base import Strategy, StrategyExtended
from mpidist.testing import run_ranks

TWO = {"chief": ["a:1"], "worker": ["b:1"]}


class Own(Strategy):
    def __init__(self):
        self.extended = StrategyExtended(self, "/cpu:0")


MAKERS = {
    "mirrored": mpidist.MirroredStrategy,
    "multi_worker": mpidist.MultiWorkerMirroredStrategy,
    "central": mpidist.CentralStorageStrategy,
    "one_device": lambda: mpidist.OneDeviceStrategy("/cpu:0"),
    "tpu": mpidist.TPUStrategy,
    "parameter_server": mpidist.ParameterServerStrategy,
    "own": Own,
}


def config(cluster, task_type="worker"):
    return json.dumps({"cluster": cluster, "task": {"type": task_type, "index": 0}})


@pytest.fixture
def by_hand(monkeypatch):
    """A process that no launcher started, and that has joined no world yet."""
    monkeypatch.setattr(transports, "_of_process", [])
    monkeypatch.setattr(transports, "_entered", [])
    monkeypatch.setattr(transports, "detect_launcher", lambda: None)
    return monkeypatch


@pytest.mark.parametrize("name", MAKERS)
def test_every_strategy_refuses_to_train_without_the_other_tasks(by_hand, name):
    by_hand.setenv("TF_CONFIG", config(TWO))
    with pytest.raises(
        LaunchError, match="2 tasks that train .* only 1 rank here.*`mpidist run -n 2 SCRIPT`.*srun --mpi=PLUGIN -n 2"
    ):
        MAKERS[name]()


@pytest.mark.parametrize("job", ["chief", "master", "tpu_worker"])  # TensorFlow 1 and Kubeflow call a chief master
def test_jobs_of_every_name_count(by_hand, job):
    by_hand.setenv("TF_CONFIG", config({job: ["a:1"], "worker": ["b:1"]}, job))
    with pytest.raises(LaunchError, match="TF_CONFIG has 2 tasks"):
        mpidist.MirroredStrategy()


def test_servers_count_too(by_hand):
    by_hand.setenv("TF_CONFIG", config({"worker": ["a:1"], "ps": ["b:1", "c:1"]}))
    with pytest.raises(LaunchError, match="TF_CONFIG has 3 tasks"):
        mpidist.MirroredStrategy()
    with pytest.raises(ValueError, match="mpidist run -n 3"):
        mpidist.ParameterServerStrategy()


@pytest.mark.parametrize("text", ["", config(TWO, "evaluator"), config({"worker": ["a:1"], "evaluator": ["b:1"]})])
def test_one_that_is_alone_by_right_trains(by_hand, text):
    by_hand.setenv("TF_CONFIG", text)
    assert mpidist.MirroredStrategy().num_replicas_in_sync == 1


def test_who_makes_no_strategy_is_left_alone(by_hand):
    by_hand.setenv("TF_CONFIG", config(TWO))
    assert mpidist.cluster_resolver.TFConfigClusterResolver().task_type == "worker"
    assert mpidist.cluster_resolver.MPIClusterResolver().topology.size == 1
    assert mpidist.get_strategy().num_replicas_in_sync == 1


def test_a_world_that_was_given_is_the_users_to_know(by_hand):
    by_hand.setenv("TF_CONFIG", config({"worker": ["a:1", "b:1", "c:1"]}))
    assert run_ranks(2, lambda: mpidist.MirroredStrategy().num_replicas_in_sync) == [2, 2]
    transports.enter(transports.alone())
    assert mpidist.MirroredStrategy().num_replicas_in_sync == 1


def test_a_part_of_a_world_that_was_joined_is_no_smaller_job(by_hand):
    by_hand.setattr(transports, "_join", lambda: SimpleNamespace(topology=SimpleNamespace(size=3)))
    by_hand.setenv("TF_CONFIG", config({"worker": ["a:1", "b:1", "c:1"]}))
    transports.world()
    transports.enter(transports.alone())  # as a worker under ParameterServerStrategy does
    assert mpidist.MirroredStrategy().num_replicas_in_sync == 1


def test_what_cannot_be_read_is_said_to_be_tf_config(by_hand):
    by_hand.setenv("TF_CONFIG", '{"cluster"')
    with pytest.raises(ValueError, match="TF_CONFIG cannot be read: .*got '{\"cluster\"'"):
        mpidist.MirroredStrategy()


@given(
    st.dictionaries(st.sampled_from(["chief", "worker", "ps", "evaluator"]), st.integers(0, 4)),
    st.sampled_from(["chief", "worker", "ps", "evaluator"]),
    st.integers(1, 12),
)
def test_more_tasks_than_ranks_are_refused_and_no_others(counts, task_type, size):
    text = config({job: [f"h{n}:1" for n in range(count)] for job, count in counts.items()}, task_type)
    tasks = tasks_that_train({"TF_CONFIG": text})
    training = sum(count for job, count in counts.items() if job != "evaluator")
    assert tasks == (0 if task_type == "evaluator" else training)
    if tasks > size:
        with pytest.raises(LaunchError):
            check_all_joined(tasks, size)
    else:
        check_all_joined(tasks, size)
