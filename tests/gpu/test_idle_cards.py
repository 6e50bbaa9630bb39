"""Ranks that nobody gave a GPU are all on the first one: rank 0 says so, once, where others are idle."""

from __future__ import annotations

import threading

import numpy
import pytest

import mpidist
from mpidist.device import cards, nccl
from tests.gpu.library import check_on_all_ranks, host, place

pytestmark = [
    pytest.mark.mpi(min_size=2),
    pytest.mark.gpu(only=True),
    pytest.mark.filterwarnings("ignore:OneDeviceStrategy reduces nothing"),
]


@pytest.mark.parametrize("has_nccl", [True, False])
@pytest.mark.parametrize("is_chosen", [False, True])
def test_ranks_on_the_first_gpu_by_nobodys_choice_are_told_of_idle_ones(xp, caplog, monkeypatch, is_chosen, has_nccl):
    """In a world of their own, as in a process that has no strategy; on one machine."""
    if not has_nccl:  # as with CuPy's wheel alone
        monkeypatch.delattr(xp.cuda.nccl, "get_version")
    mpi = pytest.importorskip("mpi4py.MPI")
    rank, size = place()
    monkeypatch.setattr(cards, "_taken", set())
    monkeypatch.setattr(nccl, "_idle_told", threading.Lock())
    totals = []
    for _ in range(2):
        with mpidist.new_world(mpi.COMM_WORLD) as world, xp.cuda.Device(0):
            if is_chosen:
                mpidist.OneDeviceStrategy("/gpu:0")
            totals.append(host(mpidist.all_reduce(xp.full(3, rank + 1.0))))
        world.close()
    lines = [record.getMessage() for record in caplog.records if "have one GPU" in record.getMessage()]
    count = xp.cuda.runtime.getDeviceCount()
    is_told = rank == 0 and count > 1 and not is_chosen
    problems = [] if len(lines) == is_told else [f"told: {lines}"]
    problems += [line for line in lines if f"no rank has {count - 1} of the {count} that they see" not in line]
    if not all(numpy.array_equal(each, [size * (size + 1) / 2] * 3) for each in totals):
        problems.append(f"totals: {totals}")
    check_on_all_ranks("; ".join(problems))
