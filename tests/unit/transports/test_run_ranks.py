"""Ranks as threads: results, worlds, and how the errors of several ranks become one."""

import sys
import threading
import traceback

import pytest

from mpidist import transports
from mpidist.errors import CollectiveMismatchError, RankFailedError, TransportTimeoutError
from mpidist.testing import RankErrors, run_ranks
from mpidist.transports import world


def exchange():
    transport = world().transport
    return transport.exchange(b"x", transport.control.watch("an exchange"))


def raise_on(errors):
    """Raise what `errors` has for this rank, or wait for the others."""
    rank = world().transport.rank
    if rank in errors:
        raise errors[rank]
    exchange()


def test_results_come_by_rank():
    assert run_ranks(4, lambda factor: world().transport.rank * factor, 10) == [0, 10, 20, 30]


def test_each_thread_sees_its_own_world_and_the_hosts_that_were_given():
    def look():
        mine = world()
        assert mine is world()
        return mine.transport.rank, mine.topology.node_of, mine.control.name(2)

    nodes = (0, 0, 1)
    assert run_ranks(3, look, hosts=["a", "a", "b"]) == [(rank, nodes, "rank 2 (b)") for rank in range(3)]


def test_threads_that_a_rank_starts_are_not_ranks():
    def child():
        sizes = []
        thread = threading.Thread(target=lambda: sizes.append(world().transport.size))
        thread.start()
        thread.join()
        return sizes

    assert run_ranks(2, child) == [[1], [1]]


def test_worlds_are_gone_afterwards():
    run_ranks(2, exchange)
    assert world().transport.size == 1
    assert transports.world() is world()


def test_the_number_of_hosts_must_be_that_of_ranks():
    with pytest.raises(ValueError, match="2 hosts for 3 ranks"):
        run_ranks(3, exchange, hosts=["a", "b"])


def test_one_failure_is_raised_as_it_is_with_its_rank():
    with pytest.raises(KeyError, match="spam") as caught:
        run_ranks(3, raise_on, {1: KeyError("spam")})
    error = caught.value
    assert error.__notes__[0] == "raised on rank 1 of 3"
    assert list(error.rank_errors)[0] == 1 and set(error.rank_errors) == {0, 1, 2}
    assert all(isinstance(error.rank_errors[rank], RankFailedError) for rank in (0, 2))
    if sys.version_info >= (3, 11):
        assert "raised on rank 1 of 3" in "".join(traceback.format_exception(error))


def test_the_same_type_on_all_ranks_is_raised_as_that_type():
    errors = {rank: CollectiveMismatchError(f"seen from {rank}") for rank in range(3)}
    with pytest.raises(CollectiveMismatchError) as caught:
        run_ranks(3, raise_on, errors)
    assert caught.value.rank_errors == errors
    assert len(caught.value.__notes__) == 3


def test_different_types_are_raised_together():
    with pytest.raises(RankErrors) as caught:
        run_ranks(3, raise_on, {0: KeyError("spam"), 2: ZeroDivisionError("eggs")})
    assert {rank: type(error) for rank, error in caught.value.rank_errors.items() if rank != 1} == {
        0: KeyError,
        2: ZeroDivisionError,
    }
    for words in ("3 of 3 ranks failed", "-- rank 0 of 3", "-- rank 2 of 3", "KeyError: 'spam'", "Error: eggs"):
        assert words in str(caught.value)


def test_assertions_of_several_ranks_are_an_assertion():
    def check():
        assert world().transport.rank > 5

    with pytest.raises(AssertionError) as caught:
        run_ranks(3, check)
    assert set(caught.value.rank_errors) == {0, 1, 2}


def test_a_rank_that_exits_cleanly_has_no_result():
    def leave():
        if world().transport.rank == 1:
            sys.exit(0)
        return world().transport.rank

    assert run_ranks(3, leave) == [0, None, 2]


def test_a_rank_that_exits_with_an_error_fails():
    with pytest.raises(SystemExit):
        run_ranks(2, lambda: sys.exit(3))


def test_a_call_that_a_rank_never_makes_is_seen_as_having_left():
    def collective():
        control = world().control
        if control.rank == 1:
            return
        control.meet(control.begin("all_reduce", digest=7))

    with pytest.raises(RankFailedError, match="rank 1 .* left .* all_reduce") as caught:
        run_ranks(3, collective)
    assert set(caught.value.rank_errors) == {0, 2}


def test_a_deadline_names_the_missing_rank():
    reached = threading.Event()

    def collective():
        control = world().control
        if control.rank == 1:
            reached.wait(30)
            return
        try:
            control.meet(control.begin("all_reduce", digest=7))
        finally:
            reached.set()

    with pytest.raises(TransportTimeoutError, match="all_reduce .* rank 1") as caught:
        run_ranks(3, collective, timeout_seconds=0.2)
    assert {type(error) for error in caught.value.rank_errors.values()} == {TransportTimeoutError}


def test_a_rank_that_never_ends_is_shown_where_it_stands(monkeypatch):
    monkeypatch.setattr("mpidist.testing.ranks._GRACE_SECONDS", 0.5)
    end = threading.Event()

    def stuck_here():
        end.wait(30)

    try:
        with pytest.raises(TransportTimeoutError, match="rank 0 still runs after 0.6 s, at(.|\n)*stuck_here"):
            run_ranks(2, stuck_here, timeout_seconds=0.1)
    finally:
        end.set()


# -- the world of a process --------------------------------------------------------------------------------------------


@pytest.fixture
def fresh(monkeypatch):
    """A process that has not joined its world yet, in an environment without launchers; undone afterwards."""
    monkeypatch.setattr(transports, "_of_process", [])
    monkeypatch.setattr(transports, "detect_launcher", lambda: None)
    return monkeypatch


def test_a_process_that_nobody_launched_is_alone_and_joins_once(fresh):
    first = world()
    assert (first.transport.name, first.transport.size, first.topology.size) == ("single", 1, 1)
    assert first.launcher == "python"
    assert world() is first
    transports.forget()
    assert world() is not first


def test_mpi_is_not_started_where_it_is_not_wanted(fresh):
    fresh.setattr(transports, "detect_launcher", lambda: pytest.fail("asked for a launcher"))
    fresh.setenv("MPIDIST_NO_MPI", "1")
    assert world().transport.name == "single"


def test_under_a_launcher_the_world_is_that_of_mpi(fresh):
    joined = object()
    fresh.setattr(transports, "detect_launcher", lambda: "mpirun")
    fresh.setattr("mpidist.transports.mpi_world.connect", lambda: joined)
    assert world() is joined
