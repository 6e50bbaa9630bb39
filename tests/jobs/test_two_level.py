"""All-reduces of two levels under a real mpirun, on pretended nodes: values, bits, and failures in the middle."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.jobs import run_job

START = """
import math, os, signal, sys
import ml_dtypes, numpy
from mpidist.world import world_communicator
from mpidist.collectives.engine import Engine

communicator = world_communicator()
rank, size, topology = communicator.rank, communicator.size, communicator.topology

def check(ok, what):
    assert communicator.exchange(b"1" if ok else b"0") == [b"1"] * size, what
"""

VALUES = """
for count in (1, 7, 1000, 100_003, 1_500_000):
    for dtype in ("f4", "f8", "i4", "c16", "f2", ml_dtypes.bfloat16):
        pattern = numpy.arange(count) % 5
        buffer = (pattern + rank).astype(dtype)
        communicator.all_reduce(buffer, algorithm="two_level")
        check((buffer == (pattern * size + size * (size - 1) // 2).astype(dtype)).all(), (count, dtype))
for op, expected in {"min": 1, "max": size, "prod": math.factorial(size)}.items():
    buffer = numpy.full(70_000, rank + 1.0)
    communicator.all_reduce(buffer, op, algorithm="two_level")
    check((buffer == expected).all(), op)
flags = numpy.arange(5000) % size == rank
communicator.all_reduce(flags, "max", algorithm="two_level")
check(flags.all(), "truth values")

normal = numpy.random.default_rng(rank).normal
fused = Engine(communicator, algorithm="two_level")
for step in range(4):
    tensors = [normal(size=shape).astype("f4") for shape in [(300, 70), (5,), (90_000,), (2, 3, 40_000), ()]]
    tensors[2] = tensors[2][::-1]
    exact = [tensor.astype("f8") for tensor in tensors]
    for total in exact:
        flat = total.reshape(-1)
        communicator.all_reduce(flat, algorithm="ring")
        total[...] = flat.reshape(total.shape)
    means = fused(tensors, "mean")
    for mean, total in zip(means, exact, strict=True):
        numpy.testing.assert_allclose(mean, total / size, rtol=0, atol=4e-6)
    bits = b"".join(mean.tobytes() for mean in means)
    check(len(set(communicator.exchange(bits))) == 1, "bits differ")
if rank == 0:
    print("checked on", topology.describe())
"""

KILLED = """
from mpidist.collectives.ways.two_level import TwoLevel

reduction = TwoLevel(communicator._memory.lanes, 3_000_000, numpy.dtype("f4"), "sum")

def fill(index, place):
    if index == 9 and rank == BAD:
        print("killing myself", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    place[...] = 1

with communicator.control.turnstile:
    watch = communicator.begin(communicator.call("test"))
    reduction.run(watch, fill, lambda start, values: None)
    print("came to the end", flush=True)
"""


@pytest.mark.parametrize(
    ("ranks", "nodes", "described"),
    [
        (2, 2, "2 nodes x 1 rank"),
        (3, 2, "2 nodes: 2+1 ranks"),
        (4, 2, "2 nodes x 2 ranks"),
        (5, 3, "3 nodes: 2+2+1 ranks"),
        (8, 2, "2 nodes x 4 ranks"),
    ],
)
def test_values_and_bits(ranks: int, nodes: int, described: str):
    result = run_job(ranks, START + VALUES, timeout_seconds=300, env={"MPIDIST_VIRTUAL_NODES": str(nodes)})
    assert result.returncode == 0, result.stderr
    assert f"checked on {described}\n" in result.stdout


@pytest.mark.parametrize("bad", [0, 3])
def test_a_rank_killed_in_the_middle_ends_the_job(bad: int):
    result = run_job(4, START + f"BAD = {bad}\n" + KILLED, env={"MPIDIST_VIRTUAL_NODES": "2"})
    assert result.returncode != 0
    assert result.stdout.count("killing myself") == 1
    assert "came to the end" not in result.stdout


def test_one_node_without_shared_memory_leaves_all_with_messages(tmp_path: Path):
    """Rank 0 cannot make the memory of its node; the other node could, but all must take the same way."""
    script = """
import mpidist.transports.node_memory as node_memory
from mpidist.cluster.launchers import detect_launcher
if detect_launcher().rank == 0:
    def refuse(nbytes, reserved):
        raise OSError("none left")
    node_memory.SharedFile = refuse
"""
    script += START + VALUES.replace('algorithm="two_level"', 'algorithm="auto"')
    script += '\nif rank == 0:\n    print("has", communicator.facts())'
    env = {"MPIDIST_VIRTUAL_NODES": "2", "MPIDIST_TUNING_FOLDER": str(tmp_path)}
    result = run_job(4, script, timeout_seconds=300, env=env)
    assert result.returncode == 0, result.stderr
    assert re.search(r"has .*has_segments=False", result.stdout)
    assert "none left" in result.stderr


def test_what_is_chosen_on_two_nodes_is_two_levels(tmp_path: Path):
    script = (
        START + "\nbuffer = numpy.ones(1_000_000)\ncommunicator.all_reduce(buffer)\ncheck((buffer == size).all(), 0)"
    )
    script += "\nif rank == 0:\n    print(communicator.way(8_000_000, None).label)"
    env = {"MPIDIST_VIRTUAL_NODES": "2", "MPIDIST_TUNING_FOLDER": str(tmp_path)}
    result = run_job(4, script, env=env)
    assert result.returncode == 0, result.stderr
    assert "two_level in segments" in result.stdout
