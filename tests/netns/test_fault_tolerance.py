"""Parameter servers over hosts that really are joined by a link, when a rank is killed: by ``mpidist run``."""

from __future__ import annotations

import re
import shlex
import sys

import pytest

from tests.helpers.grid import grid
from tests.helpers.launch import JobResult, environment, run_process
from tests.jobs.test_coordinator import needs_ulfm
from tests.netns.hosts import LIMIT_SECONDS, Hosts

#: Rank 0 is the chief, 1 and 2 are workers, the last rank of host2 is the server.  The victim dies in the middle.
COORDINATED = """
import os, signal, sys, time
import numpy
import mpidist

strategy = mpidist.ParameterServerStrategy(num_ps=1)
with strategy.scope():
    total = mpidist.Variable(numpy.zeros(2, "int64"))

def count(x):
    total.assign_add([x, 0])
    time.sleep(0.005)
    return mpidist.coordinator.experimental_get_current_worker_index()

def die():
    if mpidist.coordinator.experimental_get_current_worker_index() == int(sys.argv[1]):
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.05)

coordinator = mpidist.coordinator.ClusterCoordinator(strategy)
values = [coordinator.schedule(count, args=(1,)) for _ in range(100)]
coordinator.schedule(die), coordinator.schedule(die)
values += [coordinator.schedule(count, args=(1,)) for _ in range(100)]
coordinator.join()
ran = coordinator.fetch(values)
print("ran on", sorted({*ran[-20:]}), "counted enough:", total.value[0] >= 200, flush=True)
"""

#: Every rank but the last, the server, has the program.
BETWEEN_GRAPH = """
import os, signal, sys, time
import numpy
import mpidist

strategy = mpidist.ParameterServerStrategy(num_ps=1)
worker = strategy.cluster_resolver.task_type == "worker"
with strategy.scope():
    total = mpidist.Variable(numpy.zeros(2, "int64"))
for step in range(100):
    total.assign_add([1, 0])
    if worker and strategy.cluster_resolver.task_id == int(sys.argv[1]) and step == 50:
        os.kill(os.getpid(), signal.SIGKILL)
print("came to the end", flush=True)
"""


def _run(hosts: Hosts, tmp_path, text: str, victim: int, *options: str) -> JobResult:
    """Run a script on two ranks of each of two hosts."""
    script = tmp_path / "script.py"
    script.write_text(text)
    agent = ["--prtemca", "plm_ssh_agent", str(hosts.folder / "rsh"), "--prtemca", "plm_ssh_no_tree_spawn", "1"]
    where = shlex.join([*agent, "--host", "host1:2,host2:2"])
    command = [sys.executable, "-m", "mpidist", "run", "-n", "4", *options, "--launcher-args", where, str(script)]
    start = [str(hosts.folder / "on"), "head", *command, str(victim)]
    return run_process(start, environment(), LIMIT_SECONDS)


@needs_ulfm
@pytest.mark.parametrize("victim", grid([], [0, 1]), ids=lambda victim: "far" if victim else "near")
def test_the_chief_goes_on_without_a_worker_of_any_host(hosts: Hosts, tmp_path, victim: int):
    result = _run(hosts, tmp_path, COORDINATED, victim, "--fault-tolerant")
    assert result.returncode == 0, result.stderr
    assert result.stdout == f"ran on [{1 - victim}] counted enough: True\n"
    assert re.search(
        rf"worker {victim} \(rank {victim + 1}\): rank {victim + 1} \(host{victim + 1}\) died", result.stderr
    )


@needs_ulfm
@pytest.mark.parametrize("victim", grid([1], [0]), ids=lambda victim: "far" if victim else "near")
def test_workers_go_on_without_a_worker_of_any_host(hosts: Hosts, tmp_path, victim: int):
    result = _run(hosts, tmp_path, BETWEEN_GRAPH, victim, "--fault-tolerant")
    assert result.returncode == 0, result.stderr
    assert result.stdout == "came to the end\n" * 2


@needs_ulfm
@pytest.mark.parametrize("victim", grid([], [0, 1]))
def test_without_fault_tolerance_the_job_ends(hosts: Hosts, tmp_path, victim: int):
    result = _run(hosts, tmp_path, BETWEEN_GRAPH, victim)
    assert result.returncode != 0
    assert result.seconds < 30
