"""Jobs that go wrong under srun, on two nodes: they end, with a non-zero status, and say who and why."""

from __future__ import annotations

import itertools
import re

import pytest

from mpidist.cluster.slurm_plugins import family
from tests.helpers.launch import JobResult
from tests.slurm.cluster import LIMIT_SECONDS, Slurm, mpi

#: What ranks do that go on for longer than any step may take: a step that waits for them is ended as one that hangs.
ENDLESS = f"time.sleep({10 * LIMIT_SECONDS})"

STEPS = """
import os, signal, sys, time
import numpy
from mpidist.world import world_communicator
from mpidist.collectives.engine import Engine

communicator = world_communicator()
rank, size = communicator.rank, communicator.size
assert communicator.topology.hosts == ("node1", "node1", "node2", "node2"), communicator.topology.hosts
fused = Engine(communicator)

def steps(count, shape=(4, 3), **options):
    for _ in range(count):
        fused([numpy.ones(shape, "float32")], names=["w"], **options)

steps(20)
"""


def _run(slurm: Slurm, body: str, *options: str, **env: str) -> JobResult:
    result = slurm.run_script(STEPS + body, *options, env=env)
    assert result.returncode != 0, result.stderr
    return result


def _last_said(result: JobResult) -> str:
    """Return the last thing any rank printed: what follows it may only be Slurm's and MPI's own."""
    match = re.search(r"mpidist: rank (\d+) of 4 failed.*?\n(.*)mpidist: end of rank \1\n", result.stderr, re.DOTALL)
    assert match, f"no rank said that it failed:\n{result.stderr}"
    after = result.stderr[match.end() :]
    assert "Traceback" not in after and "mpidist:" not in after, after
    return match.group(2)


@pytest.mark.parametrize("kill", ["0", "1"])
@pytest.mark.parametrize("bad", [0, 3])
def test_an_exception_ends_the_step_with_its_traceback_last(slurm: Slurm, bad: int, kill: str):
    body = f'if rank == {bad}: raise ValueError("boom")\nsteps(1)'
    result = _run(slurm, body, f"--kill-on-bad-exit={kill}")
    assert f"mpidist: rank {bad} of 4 failed on node{1 + bad // 2}\n" in result.stderr
    assert _last_said(result).endswith("ValueError: boom\n")


def test_an_exception_while_the_others_compute_ends_the_step_too(slurm: Slurm):
    result = _run(slurm, f'if rank == 2: raise ValueError("boom")\n{ENDLESS}', "--kill-on-bad-exit=0")
    assert _last_said(result).endswith("ValueError: boom\n")


@pytest.mark.parametrize("failing", [(0, 1), (1, 2)], ids=["a node", "two nodes"])
def test_ranks_that_fail_each_by_its_own_error_do_not_mix_what_they_print(slurm: Slurm, failing: tuple[int, ...]):
    text = 'ValueError("".join(f"line {line} of rank {rank}\\n" for line in range(300)))'
    result = _run(slurm, f"if rank in {failing}: raise {text}\n{ENDLESS}", "--kill-on-bad-exit=1")
    said = re.findall(
        r"^(?:mpidist: rank|(?:ValueError: )?line \d+ of rank|mpidist: end of rank) (\d)", result.stderr, re.MULTILINE
    )
    turns = [rank for rank, _ in itertools.groupby(said)]
    assert turns and len(turns) == len({*turns}), turns
    assert said.count(turns[0]) == 302


@pytest.mark.parametrize("missing", [(0,), (3,), (2, 3), (1, 2)])
def test_ranks_that_never_join_are_named_across_nodes(slurm: Slurm, missing: tuple[int, ...]):
    result = _run(slurm, f"if rank in {missing}: {ENDLESS}\nsteps(1, timeout_seconds=1)", "--kill-on-bad-exit=0")
    error = _last_said(result)
    assert "TransportTimeoutError" in error
    names = ", ".join(f"rank {rank} (node{1 + rank // 2})" for rank in missing)
    assert re.search(rf"all_reduce\(sum\) of w float32\[4, 3\] \(call 22\) waited 1.*s for {re.escape(names)}", error)
    own_words = error.rpartition(" gave up: ")[2]  # who speaks last may quote the rank whose time was up first
    assert own_words.count(" (node") == len(missing), error


def test_a_rank_that_changes_a_shape_is_named_with_both_shapes(slurm: Slurm):
    error = _last_said(_run(slurm, "steps(1, shape=(4, 5) if rank == 3 else (4, 3))"))
    assert "CollectiveMismatchError" in error
    assert "rank 3 passed 'w' float32 (4, 5), ranks 0, 1, 2 passed 'w' float32 (4, 3)" in error


def test_a_rank_that_leaves_early_with_status_0_is_named(slurm: Slurm):
    result = _run(slurm, "if rank == 3: sys.exit(0)\nsteps(1)", "--kill-on-bad-exit=0")
    assert re.search(r"rank 3 \(node2\) left .*after 21 collective calls.*in call 22", _last_said(result))


def test_a_killed_rank_is_named_by_its_neighbour(slurm: Slurm):
    # Open MPI ends the job as soon as a connection breaks, from inside a call of its own, and names nobody: the delay
    # gives the ranks on the node of the killed one, who see its process gone, the time to say so.
    delay = {"OMPI_MCA_mpi_abort_delay": "1"} if family(mpi().vendor) == "Open MPI" else {}
    result = _run(
        slurm, "if rank == 3: os.kill(os.getpid(), signal.SIGKILL)\nsteps(1)", "--kill-on-bad-exit=0", **delay
    )
    assert re.search(r"RankFailedError: rank 2 of 4: rank 3 \(node2\) died in all_reduce", result.stderr)


def test_a_killed_rank_is_named_while_the_other_node_computes(slurm: Slurm):
    body = f"if rank == 3: os.kill(os.getpid(), signal.SIGKILL)\nif rank < 2: {ENDLESS}\nsteps(1)"
    result = _run(slurm, body, "--kill-on-bad-exit=0")
    assert re.search(r"RankFailedError: rank 2 of 4: rank 3 \(node2\) died in all_reduce", _last_said(result))
