"""Resolvers: mappings in, clusters out; no MPI."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

import mpidist
import mpidist.cluster.resolvers as resolvers
from mpidist.cluster.resolvers.base import ClusterResolver
from mpidist.cluster.resolvers.mpi import MPIClusterResolver
from mpidist.cluster.resolvers.simple import SimpleClusterResolver
from mpidist.cluster.resolvers.slurm import SlurmClusterResolver
from mpidist.cluster.resolvers.tf_config import TFConfigClusterResolver
from mpidist.cluster.resolvers.union import UnionResolver
from mpidist.cluster.spec import ClusterSpec, Task
from mpidist.cluster.topology import Topology
from mpidist.errors import ClusterResolutionError
from tests.unit.cluster import recorded

TWO = ClusterSpec({"worker": ["a:1", "b:1"]})


def _slurm(rank: int, nodes: str, tasks: str, **more: str) -> dict[str, str]:
    return {
        **recorded.SRUN,
        "SLURM_PROCID": str(rank),
        "SLURM_STEP_NODELIST": nodes,
        "SLURM_STEP_TASKS_PER_NODE": tasks,
        **more,
    }


class TestRegistry:
    @pytest.mark.parametrize("name", resolvers.__all__)
    def test_every_name_is_a_resolver(self, name: str) -> None:
        assert issubclass(getattr(mpidist.cluster_resolver, name), ClusterResolver)
        assert name in dir(mpidist.cluster_resolver)

    def test_unknown_names_list_the_known(self) -> None:
        with pytest.raises(AttributeError, match="'PBSClusterResolver'.*; .* has ClusterResolver, MPIC"):
            mpidist.cluster_resolver.PBSClusterResolver  # noqa: B018

    def test_importing_starts_nothing(self) -> None:
        code = (
            "import sys, mpidist.cluster.resolvers as r; r.MPIClusterResolver;"
            "assert not {'mpi4py', 'cupy'} & set(sys.modules), sorted(sys.modules)"
        )
        subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


class TestBase:
    class Fixed(ClusterResolver):
        """What a user has to write."""

        def cluster_spec(self) -> ClusterSpec:
            return TWO

    def test_a_subclass_needs_only_the_cluster(self) -> None:
        resolver = self.Fixed("worker", 1)
        assert (resolver.task_type, resolver.task_id, resolver.environment) == ("worker", 1, "")
        assert (resolver.master(), resolver.master("worker", 0, "grpc")) == ("b:1", "grpc://a:1")
        assert resolver.num_accelerators() == {} and not resolver.is_chief
        assert repr(resolver) == "<Fixed worker 1>"
        with pytest.raises(ValueError, match="no task 2 in job 'worker'"):
            resolver.master("worker", 2)

    def test_no_task_of_a_cluster(self) -> None:
        assert self.Fixed().master() == ""
        with pytest.raises(TypeError, match="cluster_spec"):
            ClusterResolver()  # type: ignore[abstract]


class TestSimple:
    def test_tells_what_it_was_given(self) -> None:
        resolver = SimpleClusterResolver(TWO, "m", "worker", 1, "here", {"GPU": 2}, "grpc")
        assert resolver.cluster_spec() is TWO
        assert (resolver.task_type, resolver.task_id, resolver.environment) == ("worker", 1, "here")
        assert resolver.num_accelerators() == {"GPU": 2}
        assert resolver.master() == "grpc://m"
        assert resolver.master("worker", 0) == "grpc://a:1"
        assert resolver.master("worker", 0, "http") == "http://a:1"
        assert not resolver.is_chief

    def test_task_can_be_set(self) -> None:
        resolver = SimpleClusterResolver(TWO)
        assert (resolver.task_type, resolver.task_id, resolver.master()) == (None, None, "")
        resolver.task_type, resolver.task_id, resolver.rpc_layer = "worker", 0, "grpc"
        assert (resolver.task_type, resolver.task_id, resolver.rpc_layer) == ("worker", 0, "grpc")
        assert resolver.is_chief and resolver.master() == ""


class TestTFConfig:
    CONFIG = {"cluster": {"chief": ["c:1"], "worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": "1"}}

    def test_task_and_address(self) -> None:
        resolver = TFConfigClusterResolver(environ={"TF_CONFIG": json.dumps({**self.CONFIG, "rpc_layer": "grpc"})})
        assert resolver.cluster_spec().as_dict() == self.CONFIG["cluster"]
        assert (resolver.task_type, resolver.task_id) == ("worker", 1)
        assert resolver.master() == "grpc://b:1"
        assert resolver.master("chief", 0, "http") == "http://c:1"
        assert not resolver.is_chief

    def test_read_anew_at_each_call(self, monkeypatch: pytest.MonkeyPatch) -> None:
        resolver = TFConfigClusterResolver()
        for index, chief in ((0, True), (1, False)):
            config = {"cluster": TWO.as_dict(), "task": {"type": "worker", "index": index}}
            monkeypatch.setenv("TF_CONFIG", json.dumps(config))
            assert (resolver.task_id, resolver.is_chief) == (index, chief)
        monkeypatch.delenv("TF_CONFIG")
        assert (resolver.task_type, resolver.task_id, resolver.cluster_spec()) == (None, None, ClusterSpec({}))

    def test_setting_wins(self) -> None:
        resolver = TFConfigClusterResolver(environ={"TF_CONFIG": json.dumps(self.CONFIG)})
        resolver.task_type, resolver.task_id, resolver.rpc_layer = "chief", 0, "grpc"
        assert (resolver.task_type, resolver.task_id, resolver.master()) == ("chief", 0, "grpc://c:1")

    def test_which_task_is_unknown(self) -> None:
        resolver = TFConfigClusterResolver(environ={"TF_CONFIG": json.dumps({"cluster": TWO.as_dict()})})
        with pytest.raises(ClusterResolutionError, match='which task this process is; add "task"'):
            resolver.master()

    @pytest.mark.parametrize("text", ["", "[]", '"x"', '{"task": 3}', '{"task": {"index": "x"}}'])
    def test_unreadable(self, text: str) -> None:
        with pytest.raises(ValueError):
            resolver = TFConfigClusterResolver(environ={"TF_CONFIG": text})
            resolver.cluster_spec(), resolver.task_id


class TestUnion:
    def test_lists_one_after_the_other(self) -> None:
        other = ClusterSpec({"worker": ["c:1"], "ps": ["d:1"]})
        union = UnionResolver(SimpleClusterResolver(TWO), SimpleClusterResolver(other))
        assert union.cluster_spec().as_dict() == {"worker": ["a:1", "b:1", "c:1"], "ps": ["d:1"]}

    def test_a_list_and_indices(self) -> None:
        sparse = SimpleClusterResolver(ClusterSpec({"worker": {3: "d:1"}}))
        listed = SimpleClusterResolver(TWO)
        for union in (UnionResolver(listed, sparse), UnionResolver(sparse, listed)):
            assert union.cluster_spec().as_dict() == {"worker": {0: "a:1", 1: "b:1", 3: "d:1"}}

    def test_the_same_index_twice(self) -> None:
        sparse = SimpleClusterResolver(ClusterSpec({"worker": {1: "x:1", 3: "d:1"}}))
        with pytest.raises(KeyError, match="task 1 of job 'worker': 'b:1' and 'x:1'"):
            UnionResolver(SimpleClusterResolver(TWO), sparse).cluster_spec()

    def test_the_first_speaks(self) -> None:
        first = SimpleClusterResolver(TWO, "m", "worker", 1, "here", {"GPU": 1}, "grpc")
        union = UnionResolver(first, SimpleClusterResolver(ClusterSpec({"ps": ["p:1"]}), "n", "ps", 0))
        assert (union.task_type, union.task_id, union.environment) == ("worker", 1, "here")
        assert (union.master(), union.master("ps", 0)) == ("grpc://m", "grpc://p:1")
        assert union.num_accelerators() == {"GPU": 1}
        union.task_type, union.task_id = "ps", 0
        assert (union.task_type, union.task_id, first.task_type) == ("ps", 0, "worker")

    def test_needs_one(self) -> None:
        with pytest.raises(ValueError, match="at least one"):
            UnionResolver()


class TestSlurm:
    def test_recorded_step(self) -> None:
        resolver = SlurmClusterResolver(environ=recorded.SRUN)
        assert resolver.cluster_spec().as_dict() == {"worker": ["node1:8888", "node1:8889", "node2:8888"]}
        assert (resolver.task_type, resolver.task_id, resolver.master()) == ("worker", 2, "grpc://node2:8888")
        assert resolver.topology.describe() == "2 nodes: 2+1 ranks"
        assert resolver.num_accelerators() == {"GPU": 0} and resolver.task_gpus == ()

    @given(st.lists(st.integers(1, 5), min_size=1, max_size=6), st.integers(1, 6), st.data())
    def test_ranks_dealt_in_planes(self, counts: list[int], plane: int, data: st.DataObject) -> None:
        """In each turn every node that has room left takes up to `plane` ranks; 1 is cyclic, and block is one turn."""
        rank = data.draw(st.integers(0, sum(counts) - 1))
        tasks = ",".join(map(str, counts))
        places = sorted((local // plane, node, local) for node, count in enumerate(counts) for local in range(count))
        spellings = [{"SLURM_DISTRIBUTION": "plane", "SLURM_DIST_PLANESIZE": str(plane)}]
        if plane == 1:
            spellings += [{"SLURM_DISTRIBUTION": "cyclic"}, {"SLURM_DISTRIBUTION": "cyclic:block"}]
        if plane >= max(counts):
            spellings += [{"SLURM_DISTRIBUTION": "block:cyclic"}, {}]
        for spelling in spellings:
            resolver = SlurmClusterResolver(environ=_slurm(rank, f"n[0-{len(counts) - 1}]", tasks, **spelling))
            assert resolver.topology == Topology([f"n{node}" for _, node, _ in places])
            assert resolver.master() == f"grpc://n{places[rank][1]}:{8888 + places[rank][2]}"

    def test_arbitrary_placement_cannot_be_known(self) -> None:
        with pytest.raises(ClusterResolutionError, match="distribution=arbitrary.*use MPIClusterResolver"):
            SlurmClusterResolver(environ=_slurm(0, "n[1-2]", "1,2", SLURM_DISTRIBUTION="arbitrary"))

    @pytest.mark.parametrize(
        ("more", "gpus"),
        [
            ({}, 0),
            ({"SLURM_GPUS_ON_NODE": "4"}, 2),
            ({"SLURM_GPUS_ON_NODE": "4", "CUDA_VISIBLE_DEVICES": "0"}, 2),
            ({"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, 2),
            ({"CUDA_VISIBLE_DEVICES": "0,1,2"}, 1),
            ({"CUDA_VISIBLE_DEVICES": "GPU-1a,GPU-2b"}, 1),
            ({"CUDA_VISIBLE_DEVICES": "0"}, 0),
            ({"CUDA_VISIBLE_DEVICES": ""}, 0),
            ({"CUDA_VISIBLE_DEVICES": "-1"}, 0),
            ({"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, 0),
        ],
    )
    def test_share_of_gpus(self, more: dict[str, str], gpus: int) -> None:
        environ = _slurm(3, "n[1-2]", "2(x2)", **more)
        before = dict(environ)
        resolver = SlurmClusterResolver(environ=environ)
        assert resolver.num_accelerators() == {"GPU": gpus}
        assert resolver.task_gpus == tuple(range(gpus, 2 * gpus))
        assert environ == before

    def test_tasks_by_host(self) -> None:
        resolver = SlurmClusterResolver(tasks_per_node={"n1": 1, "n2": 2}, environ=_slurm(2, "n[1-2]", "9(x2)"))
        assert resolver.cluster_spec().job_tasks("worker") == ["n1:8888", "n2:8888", "n2:8889"]

    def test_a_node_without_tasks_is_named_too(self) -> None:
        resolver = SlurmClusterResolver(tasks_per_node={"n2": 2, "n1": 0}, environ=_slurm(1, "n[1-2]", "1(x2)"))
        assert resolver.cluster_spec().job_tasks("worker") == ["n2:8888", "n2:8889"]

    @pytest.mark.parametrize(
        ("tasks", "unknown", "missing"),
        [
            ({"n1": 1, "n22": 1}, "['n22']", "['n2']"),
            ({"N1": 1, "n2": 1}, "['N1']", "['n1']"),
            ({"n1": 1}, "[]", "['n2']"),
            ({"n1": 1, "n2": 1, "n3": 1}, "['n3']", "[]"),
            ({}, "[]", "['n1', 'n2']"),
        ],
    )
    def test_tasks_of_other_hosts(self, tasks: dict[str, int], unknown: str, missing: str) -> None:
        with pytest.raises(ClusterResolutionError, match="must have the step's nodes .'n1', 'n2'.*") as told:
            SlurmClusterResolver(tasks_per_node=tasks, environ=_slurm(0, "n[1-2]", "1(x2)"))
        assert f"it has {unknown}, which are not among them, and does not have {missing}" in str(told.value)

    @pytest.mark.parametrize(
        ("environ", "arguments", "says"),
        [
            ({}, {}, "SLURM_STEP_NODELIST is not set: this process was not started by srun"),
            (recorded.BATCH_SCRIPT, {}, "SLURM_STEP_NODELIST is not set"),
            (_slurm(0, "n[1-2", "1"), {}, "SLURM_STEP_NODELIST cannot be read: .*n.1-2"),
            (_slurm(0, "n1", "1(2)"), {}, "SLURM_STEP_TASKS_PER_NODE cannot be read"),
            (_slurm(0, "n[1-2]", "1"), {}, "nodes .*'n1', 'n2'.*, but tasks per node are .1."),
            (_slurm(4, "n[1-2]", "2(x2)"), {}, "SLURM_PROCID=4, but the step has 4 tasks"),
            (_slurm(0, "n[1-2]", "2(x2)"), {"jobs": {"worker": 3}}, "are for 3 tasks, but the step has 4"),
            (
                _slurm(0, "n[1-2]", "2(x2)"),
                {"gpus_per_node": 3, "gpus_per_task": 2},
                "2 tasks with 2 GPUs each need 4 GPUs on a node, but it has 3; lower gpus_per_task",
            ),
            (_slurm(0, "n1", "0"), {}, "tasks per node are .0."),
            (_slurm(0, "n[1-2]", "2(x2)"), {"tasks_per_node": {"n1": -1, "n2": 2}}, "tasks per node are .-1, 2."),
            (
                _slurm(0, "n1", "2", SLURM_DISTRIBUTION="plane", SLURM_DIST_PLANESIZE="0"),
                {},
                "plane size must be 1 or more, got 0",
            ),
        ],
    )
    def test_what_is_no_step(self, environ: dict[str, str], arguments: dict[str, object], says: str) -> None:
        with pytest.raises(ClusterResolutionError, match=says):
            SlurmClusterResolver(environ=environ, **arguments)  # type: ignore[arg-type]


class TestMPI:
    HOSTS = ["n9", "n10", "n9", "n10"]

    @pytest.mark.parametrize("rank", range(4))
    def test_all_are_workers_in_rank_order(self, rank: int) -> None:
        resolver = MPIClusterResolver(rank=rank, hosts=self.HOSTS)
        assert resolver.cluster_spec().as_dict() == {"worker": ["n9:0", "n10:1", "n9:2", "n10:3"]}
        assert (resolver.task_type, resolver.task_id) == ("worker", rank)
        assert resolver.master() == f"{self.HOSTS[rank]}:{rank}"
        assert resolver.is_chief == (rank == 0)
        assert resolver.topology == Topology(self.HOSTS)

    @pytest.mark.parametrize("roles", ["ps,chief,worker:*", ["ps", "chief", "worker", "worker"]])
    def test_explicit_roles(self, roles: str | list[str]) -> None:
        for rank, task in enumerate([Task("ps", 0), Task("chief", 0), Task("worker", 0), Task("worker", 1)]):
            resolver = MPIClusterResolver(roles, rank, self.HOSTS, num_accelerators={"GPU": 1})
            assert (resolver.task_type, resolver.task_id) == (task.type, task.index)
            assert resolver.master() == f"{self.HOSTS[rank]}:{rank}"
            assert resolver.is_chief == (rank == 1)
            jobs = {"ps": ["n9:0"], "chief": ["n10:1"], "worker": ["n9:2", "n10:3"]}
            assert resolver.cluster_spec().as_dict() == jobs
            assert resolver.num_accelerators() == {"GPU": 1}

    @pytest.mark.parametrize("roles", ["worker:3", ["worker"] * 3, ["boss"] * 4])
    def test_roles_for_other_ranks(self, roles: str | list[str]) -> None:
        with pytest.raises(ValueError, match="3 rank|3 roles|unknown role"):
            MPIClusterResolver(roles, 0, self.HOSTS)

    def test_rank_and_hosts_go_together(self) -> None:
        with pytest.raises(ClusterResolutionError, match="go together, got rank 2 and hosts None"):
            MPIClusterResolver(rank=2)
        with pytest.raises(ClusterResolutionError, match="go together, got rank None"):
            MPIClusterResolver(hosts=self.HOSTS)
        with pytest.raises(ClusterResolutionError, match="rank 4 is none of the 4 ranks"):
            MPIClusterResolver(rank=4, hosts=self.HOSTS)

    def test_alone_without_a_launcher(self) -> None:
        """A process started by hand is one rank, and MPI is not even imported."""
        code = (
            "import platform, sys; from mpidist.cluster.resolvers import MPIClusterResolver; r = MPIClusterResolver();"
            "assert r.cluster_spec().as_dict() == {'worker': [platform.node() + ':0']} and r.is_chief;"
            "assert 'mpi4py' not in sys.modules"
        )
        subprocess.run([sys.executable, "-c", code], check=True, timeout=60, env={"PYTHONPATH": ":".join(sys.path)})
