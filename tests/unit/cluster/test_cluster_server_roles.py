"""Roles in a job with parameter servers."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpidist.cluster.roles import parse_roles
from mpidist.cluster.server_roles import choose, deal, possible_split
from mpidist.cluster.spec import Task
from mpidist.cluster.topology import Topology


def jobs(roles):
    return [task.type for task in roles.tasks]


def test_eight_ranks_with_two_servers_are_a_chief_five_workers_and_two_servers():
    roles = choose(Topology(["n0"] * 8), num_ps=2)
    assert jobs(roles) == ["chief"] + ["worker"] * 5 + ["ps"] * 2
    assert roles.tasks[5] == Task("worker", 4)
    assert (roles.chief, roles.servers, roles.evaluator) == (0, (6, 7), None)
    assert roles.trainers == ((0,), (1,), (2,), (3,), (4,), (5,))
    assert roles.number_of(3) == 3 and roles.number_of(7) is None


def test_servers_are_spread_over_the_nodes():
    roles = choose(Topology(["n0", "n1"] * 3), num_ps=2)
    assert jobs(roles) == ["chief", "worker", "worker", "worker", "ps", "ps"]
    roles = choose(Topology(["n0"] * 3 + ["n1"] * 3), num_ps=2)
    assert jobs(roles) == ["chief", "worker", "ps", "worker", "worker", "ps"]


def test_by_default_each_node_has_a_server():
    assert jobs(choose(Topology(["n0"] * 3 + ["n1"] * 3))) == ["chief", "worker", "ps", "worker", "worker", "ps"]
    assert jobs(choose(Topology(["n0", "n1"]))) == ["worker", "ps"]
    assert choose(Topology(["n0"])).trainers == ((0,),)


def test_roles_as_text():
    roles = choose(Topology(["n"] * 6), text="ps:2,chief,worker:*,evaluator")
    assert jobs(roles) == ["ps", "ps", "chief", "worker", "worker", "evaluator"]
    assert (roles.chief, roles.evaluator, roles.trainers) == (2, 5, ((2,), (3,), (4,)))


def test_workers_of_several_ranks():
    roles = choose(Topology(["n"] * 7), num_ps=1, ranks_per_worker=2)
    assert roles.trainers == ((0, 1), (2, 3), (4, 5)) and roles.chief is None
    roles = choose(Topology(["n"] * 6), num_ps=1, ranks_per_worker=2)
    assert roles.trainers == ((0,), (1, 2), (3, 4)) and roles.chief == 0
    assert roles.tasks[3] == roles.tasks[4] == Task("worker", 1)


def test_the_ranks_of_a_node_as_one_worker():
    roles = choose(Topology(["n0"] * 3 + ["n1"] * 3), num_ps=2, ranks_per_worker="node")
    assert roles.trainers == ((0, 1), (3, 4))
    roles = choose(Topology(["n0", "n1"] * 3), text="worker:4,ps:2", ranks_per_worker="node")
    assert roles.trainers == ((0, 2), (1, 3))


SLURM = {
    "SLURM_HET_SIZE": "2",
    "SLURM_JOB_NODELIST_HET_GROUP_0": "gpu[1-2]",
    "SLURM_JOB_NODELIST_HET_GROUP_1": "big7",
}


def test_components_of_a_slurm_job():
    topology = Topology(["gpu1", "gpu1", "gpu2.cluster.org", "big7", "big7"])
    assert jobs(choose(topology, environ=SLURM)) == ["chief", "worker", "worker", "ps", "ps"]
    assert jobs(choose(topology, environ=SLURM, num_ps=2)) == ["chief", "worker", "worker", "ps", "ps"]
    refused = "^the last component of the Slurm job has 2 ps, .* num_ps=1; leave num_ps out, .*=chief:1,worker:3,ps:1$"
    with pytest.raises(ValueError, match=refused):
        choose(topology, environ=SLURM, num_ps=1)
    with pytest.raises(ValueError, match="num_ps=1; leave num_ps out$"):  # no split of 5 ranks has a worker of 7
        choose(topology, environ=SLURM, num_ps=1, ranks_per_worker=7)
    with pytest.raises(ValueError, match="^SLURM_HET_SIZE: expected the number of .*; got 'two'$"):
        choose(topology, environ={**SLURM, "SLURM_HET_SIZE": "two"})
    above = choose(topology, environ=SLURM, num_ps=1, text="chief:1,worker:*,ps:1")
    assert jobs(above) == ["chief", "worker", "worker", "worker", "ps"]
    three = {**SLURM, "SLURM_HET_SIZE": "3", "SLURM_JOB_NODELIST_HET_GROUP_2": "ps[1-2]"}
    topology = Topology(["gpu1", "big7", "big7", "ps1", "ps2"])
    assert jobs(choose(topology, environ=three)) == ["chief", "worker", "worker", "ps", "ps"]


def test_ranks_in_one_component_only_are_told_how_to_start_in_all():
    roles = choose(Topology(["gpu1", "gpu2"]), environ=SLURM, num_ps=1)
    assert roles.source == (
        "num_ps=1, in one component of the Slurm job; srun --het-group=0,1 starts ranks in all of them"
    )
    assert choose(Topology(["gpu1", "other"]), environ=SLURM, num_ps=1).source == "num_ps=1"


def test_components_of_a_job_that_srun_has_made():
    environ = {name.replace("_HET_GROUP_", "_PACK_GROUP_"): value for name, value in SLURM.items()}
    assert jobs(choose(Topology(["gpu1", "gpu2", "big7"]), environ=environ)) == ["chief", "worker", "ps"]


def test_components_that_share_a_host_say_nothing():
    topology = Topology(["gpu1", "gpu2", "gpu2", "gpu2"])
    shared = {**SLURM, "SLURM_JOB_NODELIST_HET_GROUP_1": "gpu2"}
    assert choose(topology, environ=shared).tasks == choose(topology).tasks


@pytest.mark.parametrize("hosts", [["gpu1"] * 4, ["gpu1", "other", "big7"]])
def test_components_that_the_ranks_are_not_in_say_nothing(hosts):
    by_node = choose(Topology(hosts))
    assert choose(Topology(hosts), environ=SLURM).tasks == by_node.tasks


@given(st.lists(st.sampled_from(["a", "b", "c"]), min_size=2, max_size=12), st.integers(1, 12), st.integers(1, 4))
def test_what_is_refused_is_impossible_and_what_is_offered_is_not(hosts, num_ps, length):
    topology, size = Topology(hosts), len(hosts)
    try:
        roles = choose(topology, num_ps=num_ps, ranks_per_worker=length)
    except ValueError as error:
        rest = size - num_ps
        assert rest < 1 or (rest % length and (rest - 1) % length) or (rest == 1 and length > 1)
        split = possible_split(size, num_ps, length)
        assert (f"MPIDIST_ROLES={split}" in str(error)) == (split is not None)
        if split is not None:
            choose(topology, text=split, ranks_per_worker=length)
        return
    count = Counter(jobs(roles))
    assert count["ps"] == num_ps == len(roles.servers)
    assert sorted(rank for ranks in roles.trainers for rank in ranks) == sorted({*range(size)} - {*roles.servers})
    assert roles.tasks[0].type != "ps"
    assert all(len(ranks) == length for ranks in roles.trainers[count["chief"] :])
    on_node = Counter(topology.node_of[rank] for rank in roles.servers)
    room = [
        number for number, ranks in enumerate(topology.ranks_of_node) if len(ranks) - (0 in ranks) > on_node[number]
    ]
    assert all(on_node[number] >= max(on_node.values()) - 1 for number in room)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"num_ps": 0}, "There must be at least one ps"),
        ({"num_ps": 4}, r"at least one worker.*MPIDIST_ROLES=worker:1,ps:3.*mpidist run -n 6"),
        ({"text": "worker:4"}, r"at least one ps.*4 worker, of 4 ranks.*MPIDIST_ROLES=chief:1,worker:2,ps:1"),
        ({"text": "ps:4"}, "at least one worker"),
        ({"text": "chief:1,worker:1,ps:2", "num_ps": 1}, "has 2 ps, but .* num_ps=1"),
        (
            {"text": "chief:1,worker:2,ps:1", "ranks_per_worker": 3},
            "2 ranks of workers .* workers of 3 ranks.*worker:3,ps:1",
        ),
        ({"text": "chief:2,worker:1,ps:1"}, "at most one chief"),
        ({"ranks_per_worker": "rack"}, "'node'; got 'rack'"),
        ({"ranks_per_worker": 0}, "got 0"),
    ],
)
def test_refused_with_what_is_possible(arguments, message):
    with pytest.raises(ValueError, match=message):
        choose(Topology(["n"] * 4), **arguments)


def test_who_is_who():
    hosts = ["n0"] * 3 + ["n1"] * 3
    roles = choose(Topology(hosts), text="chief:1,worker:2,ps:2,evaluator:1")
    assert roles.table(hosts).splitlines() == [
        "roles of 6 ranks (MPIDIST_ROLES=chief:1,worker:2,ps:2,evaluator:1):",
        "  rank 0     chief       n0",
        "  ranks 1-2  worker 0-1  n0",
        "  ranks 3-4  ps 0-1      n1",
        "  rank 5     evaluator   n1",
    ]
    assert roles.cluster_spec(hosts).as_dict() == {
        "chief": ["n0:0"],
        "worker": ["n0:1", "n0:2"],
        "ps": ["n1:3", "n1:4"],
        "evaluator": ["n1:5"],
    }


def test_who_is_who_of_workers_of_several_ranks():
    hosts = ["n0"] * 5
    roles = deal(parse_roles("worker:4,ps:1", 5), Topology(hosts), 2, "by hand")
    assert "  ranks 0-3  worker 0-1, 2 ranks each  n0" in roles.table(hosts).splitlines()
