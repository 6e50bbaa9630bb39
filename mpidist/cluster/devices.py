"""The device of a rank, and the names of devices.  The one place that says which GPU a rank has.

Device names are TensorFlow's.  Short ones (``"/gpu:0"``, ``"CPU:0"``) and full ones
(``"/job:localhost/replica:0/task:0/device:GPU:0"``) mean the same device of this machine.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count

_LOCAL = re.compile(
    r"(/job:localhost)?(/replica:0)?(/task:0)?/?(device:)?(?P<kind>cpu|gpu)(:(?P<index>[0-9]+))?", re.IGNORECASE
)

#: Files that are there where a driver for GPUs is: NVIDIA's, under WSL, on a Jetson, AMD's.
_DRIVER_FILES = ("/dev/nvidiactl", "/dev/nvidia0", "/proc/driver/nvidia/version", "/dev/dxg", "/dev/nvgpu", "/dev/kfd")


@dataclass(frozen=True)
class Device:
    """One device of this machine: its kind ("CPU" or "GPU") and its number among that kind."""

    kind: str
    index: int

    @property
    def name(self) -> str:
        """The full name: ``/job:localhost/replica:0/task:0/device:GPU:0``."""
        return self.name_in("localhost", 0)

    @property
    def short_name(self) -> str:
        """The short name: ``/gpu:0``."""
        return f"/{self.kind.lower()}:{self.index}"

    def name_in(self, job: str, task: int) -> str:
        """Return the full name of this device as a device of a task: ``/job:worker/replica:0/task:1/device:GPU:0``."""
        return f"/job:{job}/replica:0/task:{task}/device:{self.kind}:{self.index}"

    def __str__(self) -> str:
        return self.name


def parse_device(device: str | Device) -> Device:
    """Return the device a name means; ValueError when it means none of this machine.  Local."""
    if isinstance(device, Device):
        return device
    match = _LOCAL.fullmatch(device)
    if match is None:
        raise ValueError(f"device {device!r} is no device of this machine; expected a name like '/gpu:0' or '/cpu:0'")
    return Device(match["kind"].upper(), int(match["index"] or 0))


def parse_devices(devices: Sequence[str | Device]) -> tuple[Device, ...]:
    """Return the devices the names mean.  Local."""
    parsed = tuple(parse_device(device) for device in devices)
    twice = [device.name for number, device in enumerate(parsed) if device in parsed[:number]]
    if twice:
        raise ValueError(f"devices {list(map(str, devices))} name the same device more than once: {', '.join(twice)}")
    return parsed


def gpu_of_rank(local_rank: int, gpu_count: int) -> int | None:
    """Return the number of a rank's GPU among the `gpu_count` that it sees, None where it sees none.  Local.

    Ranks of a node take the GPUs in turn.  A rank to which the launcher shows one GPU has that one, its number 0.
    """
    return local_rank % gpu_count if gpu_count else None


def gpus_by_turns(seen: Sequence[Sequence[str]]) -> tuple[int | None, ...]:
    """Return by rank the number of its GPU among those that it sees, None where it sees none.  Local.

    In rank order each takes the first that the fewest have.  Where others see fewer, a rank leaves its GPU to one of
    them and takes another, so that as many GPUs as possible have a rank.  Where all ranks of a machine see the same,
    that is `gpu_of_rank`.

    `seen`: by rank the GPUs, by names that are alike on all ranks: machine and PCI bus id.
    """
    ranks_of: dict[str, list[int]] = {}

    def has_found(rank: int, room: int, tried: set[str]) -> bool:
        """Return whether the rank has found a GPU that fewer than `room` have, if need be by moving others."""
        for gpu in seen[rank]:
            if len(ranks_of.setdefault(gpu, [])) < room:
                ranks_of[gpu].append(rank)
                return True
        for gpu in seen[rank]:
            for place, other in enumerate(() if gpu in tried else ranks_of[gpu]):
                tried.add(gpu)
                if has_found(other, room, tried):
                    ranks_of[gpu][place] = rank
                    return True
        return False

    least: dict[tuple[str, ...], int] = {}  # too little room for one is so for the next that sees the same
    for rank, gpus in ((rank, tuple(gpus)) for rank, gpus in enumerate(seen) if gpus):
        least[gpus] = next(room for room in count(least.get(gpus, 1)) if has_found(rank, room, set()))
    gpu_of = {rank: gpu for gpu, ranks in ranks_of.items() for rank in ranks}
    return tuple(list(gpus).index(gpu_of[rank]) if gpus else None for rank, gpus in enumerate(seen))


def gpu_of_name(device_name: str) -> int | None:
    """Return the number of the GPU that a full name of a device ends with; None for a CPU.  Local."""
    kind, index = device_name.split(":")[-2:]  # /job:worker/replica:0/task:1/device:GPU:0
    return int(index) if kind == "GPU" else None


def may_see_gpus(
    environ: Mapping[str, str] | None = None,
    exists: Callable[[str], bool] = os.path.exists,
    is_installed: Callable[[str], bool] | None = None,
) -> bool:
    """Return whether this process may have GPUs, without asking CUDA: there are a driver and CuPy.  Local.

    ``CUDA_VISIBLE_DEVICES`` may hide all GPUs; `exists` and `is_installed` look for a file and for a package.
    """
    shown = (os.environ if environ is None else environ).get("CUDA_VISIBLE_DEVICES")
    if shown is not None and shown.strip() in ("", "-1", "NoDevFiles"):
        return False
    return any(map(exists, _DRIVER_FILES)) and (is_installed or _is_installed)("cupy")


def _is_installed(package: str) -> bool:
    if package in sys.modules:
        return sys.modules[package] is not None
    return importlib.util.find_spec(package) is not None


def device_of_rank(
    local_rank: int, local_size: int, requested: Sequence[str | Device] | None = None, gpu: int | None = None
) -> Device:
    """Return the device of a rank.  Local, and the same arithmetic on every rank.

    Asked for devices, local rank i takes the i-th.  Else it is the GPU of that number, or CPU i without one.
    ValueError where there are more or fewer devices than local ranks, or as `parse_devices`.
    """
    if not requested:
        return Device("CPU", local_rank) if gpu is None else Device("GPU", gpu)
    devices = parse_devices(requested)
    if len(devices) != local_size:
        names = ", ".join(device.short_name for device in devices)
        raise ValueError(
            f"local rank {local_rank} of {local_size}: got {len(devices)} devices ({names}) for {local_size} ranks on "
            f"this node, but a rank is one replica on one device. Start as many ranks as there are devices, "
            f"`mpidist run -n {len(devices)} SCRIPT`, or leave `devices` out"
        )
    return devices[local_rank]


def invisible_devices(devices: Sequence[Device], gpu_count: int) -> tuple[Device, ...]:
    """Return those of `devices` that are GPUs this rank cannot see; they fail when used.  Local."""
    return tuple(device for device in devices if device.kind == "GPU" and device.index >= gpu_count)
