"""Devices: names, and which one a rank has."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from itertools import product
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpidist.cluster.devices import (
    Device,
    device_of_rank,
    gpu_of_name,
    gpu_of_rank,
    gpus_by_turns,
    invisible_devices,
    may_see_gpus,
    parse_device,
    parse_devices,
)

DEVICES = st.builds(Device, st.sampled_from(["CPU", "GPU"]), st.integers(0, 200))


@given(DEVICES, st.sampled_from([str.lower, str.upper, str]))
def test_every_spelling_is_the_same_device(device: Device, case: Callable[[str], str]) -> None:
    tail = f"{device.kind}:{device.index}"
    assert device.name == f"/job:localhost/replica:0/task:0/device:{tail}" == str(device)
    for text in (device.name, device.short_name, f"/device:{tail}", f"/{tail}", tail, f"/job:localhost/device:{tail}"):
        assert parse_device(case(text)) == device
    assert parse_device(device) is device


def test_number_0_may_be_left_out() -> None:
    assert parse_device("/gpu") == Device("GPU", 0)
    assert parse_device("CPU") == Device("CPU", 0)


@pytest.mark.parametrize("text", ["", "tpu:0", "/gpu:x", "/gpu:-1", "gpu:0:1", "/job:worker/task:1/device:GPU:0"])
def test_no_device_of_this_machine(text: str) -> None:
    with pytest.raises(ValueError, match=f"device {text!r} is no device of this machine"):
        parse_device(text)


def test_name_in_a_cluster() -> None:
    assert Device("CPU", 0).name_in("worker", 3) == "/job:worker/replica:0/task:3/device:CPU:0"


@given(st.lists(DEVICES, min_size=1, max_size=6, unique=True))
def test_local_rank_takes_its_device(devices: list[Device]) -> None:
    names = [device.short_name for device in devices]
    assert [device_of_rank(rank, len(names), names) for rank in range(len(names))] == devices


@pytest.mark.parametrize("requested", [None, [], ()])
def test_devices_by_default(requested: list[str] | None) -> None:
    ranks = range(6)
    assert [device_of_rank(rank, 6, requested) for rank in ranks] == [Device("CPU", rank) for rank in ranks]
    assert [device_of_rank(rank, 6, requested, rank % 2) for rank in ranks] == [Device("GPU", i % 2) for i in ranks]


@pytest.mark.parametrize("local_size", [1, 3])
def test_another_number_of_devices_than_ranks(local_size: int) -> None:
    with pytest.raises(ValueError, match=f"2 devices .*/gpu:0, /gpu:1.* for {local_size} ranks .*mpidist run -n 2 "):
        device_of_rank(0, local_size, ["/gpu:0", "GPU:1"])


def test_the_same_device_twice() -> None:
    with pytest.raises(ValueError, match="more than once: /job:localhost/replica:0/task:0/device:GPU:0"):
        parse_devices(["/gpu:0", "/gpu:1", "/device:GPU:0"])


def test_invisible_devices() -> None:
    asked = parse_devices(["/cpu:0", "/gpu:0", "/gpu:1", "/gpu:2"])
    assert invisible_devices(asked, 2) == (Device("GPU", 2),)
    assert invisible_devices(asked, 0) == asked[1:]
    assert invisible_devices(asked, 3) == ()


@pytest.mark.parametrize(
    ("gpu_count", "gpus"), [(0, [None] * 4), (1, [0, 0, 0, 0]), (2, [0, 1, 0, 1]), (4, [0, 1, 2, 3]), (8, [0, 1, 2, 3])]
)
def test_ranks_of_a_node_take_gpus_in_turn(gpu_count: int, gpus: list[int | None]) -> None:
    assert [gpu_of_rank(local_rank, gpu_count) for local_rank in range(4)] == gpus


@given(st.integers(0, 9), st.integers(0, 5))
def test_ranks_that_see_the_same_gpus_take_them_in_turn(ranks: int, gpus: int) -> None:
    expected = [gpu_of_rank(rank, gpus) for rank in range(ranks)]
    assert [*gpus_by_turns(["abcde"[:gpus]] * ranks)] == expected


@pytest.mark.parametrize(
    ("seen", "gpus"),
    [
        (["ab", "ab", "cd", "cd"], [0, 1, 0, 1]),  # two sockets, as --gpu-bind=closest shows them
        (["ab", "cd", "ab", "cd"], [0, 0, 1, 1]),  # by local rank ranks 0 and 2 had a, 1 and 3 had d
        (["a", "b", "c"], [0, 0, 0]),  # each its own
        (["ab", "a"], [1, 0]),  # the first leaves a to the second
        (["ab", "bc", "a", "c"], [1, 1, 0, 0]),  # rank 2 has a: rank 0 moves to b, and rank 1 to c, for which 3 is late
        (["ab", "", "ab"], [0, None, 1]),
        (["abc", "ab", "a"], [2, 1, 0]),
    ],
)
def test_ranks_that_see_other_gpus(seen: list[str], gpus: list[int | None]) -> None:
    assert [*gpus_by_turns(seen)] == gpus


@given(st.lists(st.sets(st.sampled_from("abcd"), min_size=1, max_size=3).map(sorted), min_size=1, max_size=5))
def test_no_other_choice_uses_more_gpus_or_has_fewer_ranks_on_one(seen: list[list[str]]) -> None:
    def loads(chosen: tuple[str, ...]) -> list[int]:
        return sorted(Counter(chosen).values(), reverse=True)

    every = [loads(choice) for choice in product(*seen)]
    found = loads(tuple(cards[gpu] for cards, gpu in zip(seen, gpus_by_turns(seen), strict=True)))
    assert len(found) == max(map(len, every)) and found[0] == min(load[0] for load in every)


@given(DEVICES)
def test_the_number_of_a_gpu_by_its_name(device: Device) -> None:
    expected = device.index if device.kind == "GPU" else None
    assert gpu_of_name(device.name) == gpu_of_name(device.name_in("worker", 3)) == expected


@pytest.mark.parametrize(
    ("environ", "files", "packages", "expected"),
    [
        ({}, {"/dev/nvidiactl"}, {"cupy"}, True),
        ({}, {"/dev/dxg"}, {"cupy"}, True),
        ({}, {"/dev/nvidiactl"}, set(), False),
        ({}, set(), {"cupy"}, False),
        ({"CUDA_VISIBLE_DEVICES": "3"}, {"/dev/nvidiactl"}, {"cupy"}, True),
        ({"CUDA_VISIBLE_DEVICES": "GPU-1a,MIG-2b"}, {"/dev/nvidiactl"}, {"cupy"}, True),
        ({"CUDA_VISIBLE_DEVICES": ""}, {"/dev/nvidiactl"}, {"cupy"}, False),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, {"/dev/nvidiactl"}, {"cupy"}, False),
        ({"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, {"/dev/nvidiactl"}, {"cupy"}, False),
    ],
)
def test_whether_there_may_be_gpus_is_seen_without_cuda(
    environ: dict[str, str], files: set[str], packages: set[str], expected: bool
) -> None:
    assert may_see_gpus(environ, files.__contains__, packages.__contains__) is expected


def test_a_package_that_cannot_be_imported_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert not may_see_gpus({}, lambda path: True)
    monkeypatch.setitem(sys.modules, "cupy", ModuleType("cupy"))
    assert may_see_gpus({}, lambda path: True)
