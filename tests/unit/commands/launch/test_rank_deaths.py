"""Which of several processes ended first, and how."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpidist.commands.launch import rank_deaths
from mpidist.commands.launch.destinations import Terminal
from mpidist.commands.launch.output_streams import STDERR, OutputStreams
from mpidist.commands.launch.rank_deaths import RankDeath, RankDeaths, Seen, first_death

LINUX = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="descriptors of processes are Linux's")


def seen(*statuses, apart=0.1):
    """Return the ends of ranks 0, 1, ... with these statuses, so many seconds apart."""
    return [Seen(rank, 100 + rank, status, rank * apart) for rank, status in enumerate(statuses)]


def test_who_ended_well_is_not_to_blame():
    assert first_death(seen(0, 0)) is None
    assert first_death(seen(0, 7, -9)).ranks == (1,)


def test_the_first_counts():
    assert first_death(seen(-9, -9, -9)) == RankDeath((0,), -9, 100)
    assert first_death(seen(None, -9)) == RankDeath((0,), None, 100)


def test_of_several_that_end_together_it_may_be_any():
    death = first_death(seen(-9, -9, 0, -9, apart=0))
    assert death == RankDeath((0, 1, 3), -9)
    sentence = "one of ranks 0, 1, 3 (the launcher does not say which) was ended by signal 9 (Killed)"
    assert death.describe().startswith(sentence)
    assert first_death(seen(-9, -15, apart=0)) == RankDeath((0, 1), None)
    assert first_death(seen(-9, None, apart=0)) == RankDeath((0, 1), -9)


def test_who_ends_by_itself_was_not_ended_by_the_launcher():
    assert first_death(seen(-9, -11, -15, apart=0)).ranks == (1,)
    assert first_death(seen(-9, -9, 7, apart=0.005)).ranks == (2,)
    assert first_death(seen(-9, 1, apart=1)).ranks == (0,)


def test_who_was_about_to_end_at_the_first_end_may_have_been_the_first():
    first, second, third = seen(-9, -9, -9)
    death = first_death([first._replace(ending=frozenset({2})), second, third])
    assert death == RankDeath((0, 2), -9)
    assert first_death([first._replace(ending=frozenset({2})), second, third._replace(status=0)]).ranks == (0,)
    assert first_death([first, second._replace(ending=frozenset({2})), third]).ranks == (0,)


@given(
    st.lists(st.tuples(st.sampled_from([0, 1, -9, -11, None]), st.sampled_from([0, 0.001, 0.01, 1])), max_size=6),
)
def test_whoever_is_named_ended_badly_and_near_the_first(ends):
    times = itertools.accumulate(apart for _, apart in ends)
    deaths = [Seen(rank, 1 + rank, status, at) for (rank, (status, _)), at in zip(enumerate(ends), times, strict=True)]
    bad = [death for death in deaths if death.status != 0]
    found = first_death(deaths)
    if found is None:
        assert not bad
    else:
        assert set(found.ranks) <= {death.rank for death in bad if death.at - bad[0].at <= 0.02}
        assert (found.process is None) == (len(found.ranks) > 1)


@pytest.mark.parametrize(
    "death, text, shell",
    [
        (RankDeath((2,), 7, 55, "vm"), "rank 2 (process 55 on vm) ended first, with status 7", 7),
        (RankDeath((2,), None, 55), "rank 2 (process 55) ended first; how is not known", None),
        (RankDeath((0,), -11, 5, "vm"), "rank 0 (process 5 on vm) was ended by signal 11 (Segmentation fault)", 139),
    ],
)
def test_sentences(death, text, shell):
    assert death.describe() == text
    assert death.shell_status == shell


@pytest.fixture
def streams():
    found = OutputStreams(0, (STDERR,), Terminal(), lambda *what: None)
    yield found
    found.close()


@pytest.fixture
def children():
    started = [subprocess.Popen([sys.executable, "-c", WAITING], stdin=subprocess.PIPE) for _ in range(3)]
    yield started
    for child in started:
        child.kill()
        child.communicate()


#: Ends with the status that it is told.
WAITING = "import os, sys\nos._exit(int(sys.stdin.readline() or 0))"


def deaths_of(children, streams):
    """Watch children by a clock that goes on by a second at every glance."""
    seconds = itertools.count()
    rank_of_process = {child.pid: rank for rank, child in enumerate(children)}
    return RankDeaths(len(children), lambda: rank_of_process, streams, lambda: float(next(seconds)))


def end(child, status):
    """End a child and wait for it, leaving its status to be asked for."""
    if status < 0:
        child.send_signal(-status)
    else:
        child.stdin.write(f"{status}\n".encode())
        child.stdin.flush()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)


@LINUX
@pytest.mark.parametrize("first", range(3))
def test_the_first_that_is_seen_to_end_is_named(streams, children, first):
    deaths = deaths_of(children, streams)
    deaths.look()
    for rank in (first, (first + 1) % 3):
        end(children[rank], -signal.SIGKILL)
        streams.pump(0)
    assert (deaths.first().ranks, deaths.first().status) == ((first,), -signal.SIGKILL)
    deaths.close()


@LINUX
def test_a_living_process_is_not_about_to_end(children):
    assert not rank_deaths._has_closed_files(children[0].pid)
    end(children[0], -signal.SIGKILL)
    assert not rank_deaths._has_closed_files(children[0].pid)  # it is over


@LINUX
def test_the_end_of_a_process_wakes_who_waits_for_output(streams, children):
    deaths = deaths_of(children, streams)
    deaths.look()
    children[1].stdin.write(b"7\n")
    children[1].stdin.flush()
    streams.pump(30)
    assert (deaths.first().ranks, deaths.first().status, deaths.first().process) == ((1,), 7, children[1].pid)
    assert deaths.of(0) is None
    deaths.close()


def test_processes_that_cannot_be_watched_are_asked_for(streams, children, monkeypatch):
    monkeypatch.setattr(rank_deaths, "_open", lambda process: None)
    deaths = deaths_of(children, streams)
    deaths.look()
    assert deaths.first() is None
    end(children[2], -signal.SIGKILL)
    deaths.look()
    assert (deaths.first().ranks, deaths.first().status) == ((2,), -signal.SIGKILL)
    deaths.close()


def test_after_close_nobody_is_to_blame(streams, children):
    deaths = deaths_of(children, streams)
    deaths.look()
    deaths.close()
    end(children[0], -signal.SIGKILL)
    deaths.look()
    streams.pump(0)
    assert deaths.first() is None


@LINUX
def test_a_process_that_is_gone_before_it_could_be_watched_ended_somehow(streams):
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    deaths = deaths_of([child], streams)
    deaths.look()
    assert deaths.first() == RankDeath((0,), None, child.pid, deaths.first().host)
    deaths.close()


@LINUX
@pytest.mark.parametrize(
    "status, known", [(-signal.SIGTERM, False), (-signal.SIGKILL, False), (-signal.SIGSEGV, True), (7, True)]
)
@pytest.mark.parametrize("elsewhere", [0, 1])
def test_who_may_have_been_ended_because_of_a_rank_on_another_machine_is_not_blamed(
    streams, children, status, known, elsewhere
):
    here = {child.pid: rank for rank, child in enumerate(children)}
    deaths = RankDeaths(len(children) + elsewhere, lambda: here, streams)
    deaths.look()
    end(children[1], status)
    streams.pump(0)
    deaths.close()
    found = deaths.first()
    assert (found and found.status) == (status if known or not elsewhere else None)
