"""Devices: names, and which one a rank has."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpidist.cluster.devices import (
    Device,
    device_of_rank,
    gpu_of_name,
    gpu_of_rank,
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
    for gpu_count in (1, 2, 4, 6, 8):
        expected = [Device("GPU", rank % gpu_count) for rank in ranks]
        assert [device_of_rank(rank, 6, requested, gpu_count) for rank in ranks] == expected


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
