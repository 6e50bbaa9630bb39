"""What ranks try together, on ranks as threads."""

from __future__ import annotations

import itertools

import numpy
import pytest

from mpidist.collectives.communicator import Communicator
from mpidist.diagnosis import trials
from mpidist.diagnosis.trials import rounds, try_together
from mpidist.testing import run_ranks
from mpidist.world import world_communicator

HOSTS = ("node1", "node2", "node1", "node3")


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 8])
def test_every_pair_meets_once_and_nobody_is_in_two_pairs_of_a_round(count):
    planned = list(rounds(count))
    assert sorted(pair for pairs in planned for pair in pairs) == list(itertools.combinations(range(count), 2))
    assert all(len({*itertools.chain(*pairs)}) == 2 * len(pairs) for pairs in planned)


def together(folder, monkeypatch):
    monkeypatch.setattr(trials, "PAIR_SECONDS", 0.3)

    def on_rank():
        return try_together(world_communicator(), "THREAD_MULTIPLE", str(folder))

    found = run_ranks(4, on_rank, hosts=HOSTS)
    assert found == [found[0]] * 4  # all ranks have the same answer
    return found[0]


def test_ranks_of_three_nodes(tmp_path, monkeypatch):
    joint = together(tmp_path, monkeypatch)
    assert joint.hosts == HOSTS and joint.reduction_error == "" and joint.blind == ()
    pairs = sorted(pair.nodes for pair in joint.pairs)
    assert pairs == [("node1", "node2"), ("node1", "node3"), ("node2", "node3")]
    assert all(pair.bytes_per_second > 0 for pair in joint.pairs)
    assert sorted(joint.clocks) == ["node2", "node3"] and max(map(abs, joint.clocks.values())) < 60
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_a_node_does_not_see(tmp_path, monkeypatch):
    monkeypatch.setattr(trials, "_reads", lambda path: world_communicator().rank != 3)
    assert together(tmp_path, monkeypatch).blind == ("node3",)


def test_a_folder_that_is_not_there_or_no_folder_is_no_matter_of_nodes(tmp_path, monkeypatch):
    assert together(tmp_path / "missing", monkeypatch).blind == ()
    (tmp_path / "file").touch()
    assert together(tmp_path / "file", monkeypatch).blind == ()


def test_an_all_reduce_that_is_wrong_on_a_rank(tmp_path, monkeypatch):
    right = Communicator.all_reduce

    def wrong(communicator, array, *args, **options):
        right(communicator, array, *args, **options)
        if communicator.rank == 1 and array.dtype == numpy.float64:
            array[17] += 1

    monkeypatch.setattr(Communicator, "all_reduce", wrong)
    assert together(tmp_path, monkeypatch).reduction_error == "wrong sums of 131072 numbers on rank 1 (node2)"
