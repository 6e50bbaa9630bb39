"""Which rank was killed, from recorded output of launchers."""

from __future__ import annotations

import pytest

from mpidist.commands.killed_ranks import KilledRanks

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


def first(text: str, rank_of: dict[int, int]):
    log = KilledRanks()
    for line in text.splitlines():
        log.feed(line)
    return log.first(rank_of)


def test_open_mpi_names_the_rank():
    killed = first(OPEN_MPI, {})
    assert (killed.rank, killed.process, killed.host, killed.signum) == (1, 14777, "vm", 9)
    assert killed.describe().startswith("rank 1 (process 14777 on vm) was ended by signal 9 (Killed)")


def test_mpich_names_the_process_and_its_rank_was_noted():
    killed = first(MPICH.format(code=9) + EXIT_STRING, {14836: 0, 14837: 1})
    assert (killed.rank, killed.process, killed.signum) == (1, 14837, 9)


def test_a_process_nobody_noted_is_a_rank_without_a_number():
    killed = first(MPICH.format(code=9) + EXIT_STRING, {})
    assert killed.describe().startswith("a rank (process 14837 on vm) was ended by signal 9")


@pytest.mark.parametrize("text", ["", "Abort(1) on node 0 (rank 0 in comm 0): application called MPI_Abort", "PID 3"])
def test_other_output_names_nobody(text):
    assert first(text, {3: 0}) is None


def test_an_exit_code_is_no_signal():
    assert first(MPICH.format(code=1), {14837: 1}) is None


def test_the_first_one_counts():
    assert first(OPEN_MPI + OPEN_MPI.replace("rank 1", "rank 2"), {}).rank == 1
