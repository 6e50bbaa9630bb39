"""``python -m benchmarks gpu`` where there is no GPU."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

from benchmarks.suite import command, gpu, gpu_steps, targets
from benchmarks.suite.results import Launch
from benchmarks.suite.rows import Row, row_of


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


def judged(subcommand: str, ranks: int, work: str, times_us: dict[str, float], size: int = 102_228_128) -> list[str]:
    """Return the verdicts about a launch that has this work alone, in the order of the targets."""
    rows: list[Row] = [
        row_of(work, size, "float32", who, "peer" if "DDP" in who else "ours", [1e-6 * time], ("copy", 1.0))
        for who, time in times_us.items()
    ]
    found = Launch(subcommand, [], ranks, "An MPI 1.0", "", {}, rows)
    lines = [line for line in targets.report([found]).splitlines() if f" {work} " in line and f" {ranks} " in line]
    return [line.split("  ")[-1].split(" ")[0] for line in lines if not line.endswith("not measured")]


@pytest.mark.parametrize(("pack_us", "verdict"), [(58, "reached"), (60, "missed")])
def test_packing_is_held_against_a_copy_by_the_time_of_the_card_alone(pack_us, verdict):
    """50 / 58 is 0.86, 50 / 60 is 0.83; a slow call of the host counts for small tensors only."""
    alone = {"copy on the device": 50, "pack": pack_us, "unpack": 50}
    times = {f"{name} (the card alone)": time for name, time in alone.items()} | {"pack": 500, "unpack": 500}
    assert judged("gpu", 1, "pack resnet50", times) == [verdict, "reached"]


def test_a_thousand_small_tensors_have_microseconds():
    times = {"pack (the card alone)": 19, "pack": 31, "unpack (the card alone)": 21, "unpack": 29}
    assert judged("gpu", 1, "pack small", times, 1_024_000) == ["reached", "missed", "missed", "reached"]


@pytest.mark.parametrize(
    ("size", "ours_us", "verdict"),
    [
        (1 << 20, 115, ["reached"]),
        (1 << 20, 116, ["missed"]),
        (25 << 20, 104, ["reached"]),
        (100_000_000, 106, ["missed"]),
        (4 << 20, 900, []),  # no target is about it
    ],
)
def test_all_reduces_are_held_against_nccls_by_their_size(size, ours_us, verdict):
    assert judged("gpu", 2, "array", {"NCCL": 100, "mpidist": ours_us}, size) == verdict
    assert judged("gpu", 2, "array", {"mpidist": ours_us}, size) == []


@pytest.mark.parametrize(("adam_us", "verdict"), [(120, "reached"), (130, "missed")])
def test_adam_is_held_against_a_copy_of_the_bytes_that_it_must_touch(adam_us, verdict):
    assert judged("gpu", 1, "adam", {"copy of as many bytes": 100, "Adam alone": adam_us}) == [verdict]


def test_what_is_staged_is_held_against_the_slower_of_its_parts():
    times = {"copies to the host and back": 900, "mpidist on the host": 1000, "mpidist": 1140}
    assert judged("gpu", 2, "resnet50", times) == ["reached"]
    assert judged("gpu", 2, "resnet50", times | {"mpidist": 1160}) == ["missed"]
    assert judged("gpu", 2, "resnet50", times | {"NCCL": 100}) == [], "that was not staged"


@pytest.mark.parametrize(("ours_us", "verdict"), [(99, "reached"), (101, "missed")])
def test_a_step_of_pytorch_is_held_against_the_quicker_of_its_own(ours_us, verdict):
    assert judged("gpu-steps", 2, "gpt", {"DDP": 110, "DDP, bucket views": 100, "mpidist": ours_us}) == [verdict]
    assert judged("gpu-steps", 2, "gpt", {"mpidist": ours_us}) == []


def test_the_part_of_the_sums_that_overlaps():
    """Of sums of 10 ms a step of 40 ms that becomes 34 ms hides six tenths; a longer one less than none."""
    assert gpu_steps.overlapped_part(40, 34, 10) == 0.6
    assert gpu_steps.overlapped_part(40, 42, 10) == -0.2
