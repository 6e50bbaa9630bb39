"""All-reduces over hosts that really are joined by a link: values, and how many bytes it carries."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time

import pytest

from tests.helpers.launch import ROOT
from tests.netns.hosts import Hosts, several_hosts

#: Sums that are known, by the public call; and how often the buffer has left each host meanwhile.
SUMS = """
import os, sys
import numpy
from mpidist.world import world_communicator
from mpidist.collectives.engine import Engine

def bytes_sent():
    with open("/proc/net/dev") as file:
        (line,) = [line for line in file if line.strip().startswith("eth0:")]
    return int(line.split(":")[1].split()[8])

communicator = world_communicator()
rank, size = communicator.rank, communicator.size
fused = Engine(communicator, algorithm=sys.argv[1])
parts = [numpy.arange(length) % 7 + rank for length in (200_000, 5, 299_995)]
expected = [(part - rank) * size + size * (size - 1) // 2 for part in parts]
parts = [part.astype("f4") for part in parts]
wrong = 0
fused(parts)
communicator.barrier()
before = bytes_sent()
for step in range(2):
    for total, known in zip(fused(parts), expected, strict=True):
        wrong += int((total != known).sum())
    communicator.barrier()
sent = (bytes_sent() - before) / (2 * sum(part.nbytes for part in parts))
told = communicator.exchange(f"{wrong} {sent:.3f}".encode())
if rank == 0:
    print("topology:", communicator.topology.describe())
    print("wrong:", *[int(each.split()[0]) for each in told])
    print("sent:", *[told[ranks[0]].split()[1].decode() for ranks in communicator.topology.ranks_of_node])
"""

#: What the headers of TCP, IP and Ethernet add, and what the ranks' checks do.
HEADERS = 1.08


def _sent(stdout: str) -> list[float]:
    """Return by host how many times the buffer has left it, in each all-reduce."""
    assert re.search(r"^wrong: 0( 0)*$", stdout, re.MULTILINE), stdout
    match = re.search(r"^sent: (.*)$", stdout, re.MULTILINE)
    assert match, stdout
    return [float(times) for times in match[1].split()]


@pytest.mark.parametrize(
    ("slots", "cyclic", "described"),
    [
        ((2, 2), False, "2 nodes x 2 ranks"),
        ((2, 2), True, "2 nodes x 2 ranks, cyclic"),
        ((3, 1), False, "2 nodes: 3+1 ranks"),
        ((1, 2), False, "2 nodes: 1+2 ranks"),
    ],
)
def test_every_host_sends_the_buffer_once(hosts: Hosts, slots: tuple[int, ...], cyclic: bool, described: str):
    result = hosts.run_script(slots, SUMS, "two_level", cyclic=cyclic)
    assert result.returncode == 0, result.stderr
    assert f"topology: {described}\n" in result.stdout
    for times in _sent(result.stdout):
        assert 1 <= times < HEADERS


@pytest.mark.parametrize(("cyclic", "times"), [(False, 1.5), (True, 3.0)], ids=["block", "cyclic"])
def test_a_flat_ring_sends_more(hosts: Hosts, cyclic: bool, times: float):
    result = hosts.run_script((2, 2), SUMS, "ring", cyclic=cyclic)
    assert result.returncode == 0, result.stderr
    for found in _sent(result.stdout):
        assert times <= found < times * HEADERS


def test_a_rank_that_raises_in_the_middle_ends_the_job(hosts: Hosts):
    script = """
import numpy
from mpidist.world import world_communicator
from mpidist.collectives.ways.two_level import TwoLevel

communicator = world_communicator()
reduction = TwoLevel(communicator._memory.lanes, 500_000, numpy.dtype("f4"), "sum")

def fill(index, place):
    if index == 4 and communicator.rank == 2:
        raise ValueError("boom")
    place[...] = 1

with communicator.control.turnstile:
    watch = communicator.begin(communicator.call("test"))
    reduction.run(watch, fill, lambda start, values: None)
print("came to the end", flush=True)
"""
    result = hosts.run_script((2, 2), script)
    assert result.returncode != 0
    assert "came to the end" not in result.stdout
    assert "ValueError: boom" in result.stderr


def test_hosts_go_when_a_test_fails(hosts: Hosts):
    with pytest.raises(RuntimeError, match="a failing test"), several_hosts() as others:
        keepers = _keepers(others)
        assert len(keepers) == 5 and all(map(_runs, keepers))  # switch, head, two hosts, and who watches this process
        raise RuntimeError("a failing test")
    assert not others.folder.exists()
    assert not any(map(_runs, keepers))


def test_hosts_go_when_their_process_is_killed(hosts: Hosts):
    script = """
import sys
from tests.netns.hosts import several_hosts
with several_hosts() as hosts:
    print(hosts.folder, flush=True)
    sys.stdin.read()
"""
    command = [sys.executable, "-c", script]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, **pipes) as process:
        others = Hosts(type(hosts.folder)(process.stdout.readline().strip()))
        keepers = _keepers(others)
        assert len(keepers) == 5 and all(map(_runs, keepers))
        process.send_signal(signal.SIGKILL)
    end = time.monotonic() + 20
    while (others.folder.exists() or any(map(_runs, keepers))) and time.monotonic() < end:
        time.sleep(0.05)
    assert not others.folder.exists()
    assert not any(map(_runs, keepers))


def _keepers(hosts: Hosts) -> list[int]:
    """Return the processes that hold the namespaces."""
    return [int(file.read_text().split()[0]) for file in (hosts.folder / "pids").iterdir()]


def _runs(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
