"""Which rank was killed, from recorded output of launchers."""

from __future__ import annotations

import pytest

from mpidist.commands.launch.rank_deaths import KilledRanks

OPEN_MPI = """\
--------------------------------------------------------------------------
prterun noticed that process rank 1 with PID 14777 on node vm exited on
signal 9 (Killed).
--------------------------------------------------------------------------
"""

MPICH = """\
===================================================================================
=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES
=   PID 14837 RUNNING AT vm
=   EXIT CODE: {code}
=   CLEANING UP REMAINING PROCESSES
=   YOU CAN IGNORE THE BELOW CLEANUP MESSAGES
===================================================================================
"""
EXIT_STRING = "YOUR APPLICATION TERMINATED WITH THE EXIT STRING: Killed (signal 9)\n"


def read(text: str, rank: int | None = None):
    log = KilledRanks()
    for line in text.splitlines():
        log.feed(rank, line)
    return log


def test_open_mpi_names_the_rank():
    killed = read(OPEN_MPI).first
    assert (killed.ranks, killed.process, killed.host, killed.status) == ((1,), 14777, "vm", -9)
    assert killed.describe().startswith("rank 1 (process 14777 on vm) was ended by signal 9 (Killed)")


def test_open_mpi_in_one_line():
    assert read(OPEN_MPI.replace("\nsignal", " signal")).first == read(OPEN_MPI).first


def test_the_process_that_mpich_names_may_be_one_that_it_has_ended():
    killed = read(MPICH.format(code=9) + EXIT_STRING).first
    assert (killed.ranks, killed.process, killed.status) == ((), None, -9)
    assert killed.describe().startswith("a rank (the launcher does not say which) was ended by signal 9")


@pytest.mark.parametrize("text", ["", "Abort(1) on node 0 (rank 0 in comm 0): application called MPI_Abort", "PID 3"])
def test_other_output_names_nobody(text):
    assert read(text).first is None


def test_what_a_rank_prints_is_not_the_launcher_s_word():
    assert read(OPEN_MPI, rank=2).first is None


def test_an_exit_code_is_no_signal():
    assert read(MPICH.format(code=1)).first is None


def test_the_first_one_counts():
    assert read(OPEN_MPI + OPEN_MPI.replace("rank 1", "rank 2")).first.ranks == (1,)


@pytest.mark.parametrize(
    "line, rank",
    [
        ("Abort(1) on node 0 (rank 0 in comm 0): application called MPI_Abort(MPI_COMM_WORLD, 1) - process 0", 0),
        ("MPI_ABORT was invoked on rank 1 in communicator MPI_COMM_WORLD", None),
    ],
)
def test_an_abort_is_noticed(line, rank):
    assert read(line, rank).aborted
    assert not read(OPEN_MPI, rank).aborted


def test_the_end_of_a_job_and_the_loss_of_a_host_are_noticed():
    line = "[host1:00000] ***    and MPI will try to terminate your MPI job as well)"
    assert read(line, 0).ending and read(line).ending
    assert read("PRTE has lost communication with a remote daemon.").host_lost
    assert read("A daemon failed to report back after being spawned. This could").host_lost
    assert not read(OPEN_MPI).ending and not read(OPEN_MPI).host_lost
