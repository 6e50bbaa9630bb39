"""``python -m benchmarks gpu`` where there is no GPU."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

from benchmarks.suite import command, gpu


def test_without_a_gpu_it_says_so_in_one_line_and_starts_no_ranks(monkeypatch, capsys):
    monkeypatch.setattr(gpu, "list_physical_devices", lambda kind: [])
    monkeypatch.setattr(command, "detect_launcher", lambda: None)
    monkeypatch.setattr(command, "launch", None)  # whoever calls it fails
    assert command.main(["gpu", "-n", "2"]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("python -m benchmarks: CuPy sees no GPU here") and printed.err.count("\n") == 1


def test_the_facts_name_nccl_which_cupy_loads_when_it_is_imported(monkeypatch):
    """It is no attribute of ``cupy.cuda`` before; without NCCL it is a module that has nothing."""
    properties = {"name": b"NVIDIA H200", "l2CacheSize": 60 << 20}
    cuda, nccl = ModuleType("cupy.cuda"), ModuleType("cupy.cuda.nccl")
    cuda.Device = lambda: SimpleNamespace(id=0)
    cuda.runtime = SimpleNamespace(getDeviceProperties=lambda index: properties, driverGetVersion=lambda: 13000)
    cupy = ModuleType("cupy")
    cupy.cuda, cupy.__version__ = cuda, "14.2.0"
    for module in (cupy, cuda, nccl):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    nccl.available, nccl.get_version = True, lambda: 23203
    assert {"gpu": "NVIDIA H200", "L2": "60 MiB", "NCCL": 23203}.items() <= gpu.facts(cupy).items()
    nccl.available = False
    del nccl.get_version
    assert gpu.facts(cupy)["NCCL"] == "none"


def test_turns_fill_the_time_that_a_row_may_take_with_all_that_they_wait_for(monkeypatch):
    """A turn of the card alone waits for the card first, which is no part of what it measures."""
    clock = [0.0]
    monkeypatch.setattr(gpu.time, "perf_counter", lambda: clock[0])

    def turn(contender, calls):
        clock[0] += 0.25
        return 1e-6

    card = gpu.Card.__new__(gpu.Card)
    card.cupy = SimpleNamespace(cuda=SimpleNamespace(Device=lambda: SimpleNamespace(synchronize=lambda: None)))
    card.ranks, card.seconds, card.rounds, card._turn = SimpleNamespace(slowest=lambda each: each), 2.0, 30, turn
    seconds, wrong = card._turns([gpu.Timed("pack", "ours", lambda: None, on_card=True)], calls=1)
    assert seconds == {"pack": [1e-6] * 8} and wrong == {"pack": None}
