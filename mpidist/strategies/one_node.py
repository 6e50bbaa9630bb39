"""What strategies for the devices of one machine ask of the ranks, and which devices these have."""

from __future__ import annotations

from collections.abc import Sequence

from mpidist.cluster.devices import Device, device_of_rank, parse_devices
from mpidist.collectives.communicator import Communicator
from mpidist.strategies.visibility import gpu_count


def require_one_node(communicator: Communicator, title: str) -> None:
    """Raise RuntimeError unless all ranks are on one node.  Local; the same on all ranks."""
    topology = communicator.topology
    if topology.node_count > 1:
        raise RuntimeError(
            f"rank {communicator.rank} of {communicator.size}: {title} is for the devices of one machine, but "
            f"the ranks are on {topology.describe()}. Use MultiWorkerMirroredStrategy, which works across machines"
        )


def devices_of_ranks(devices: Sequence[str | Device] | None, communicator: Communicator) -> tuple[Device, ...]:
    """Return the device of every rank: those asked for, else GPU i for rank i, or CPU i where there is no GPU.  Local.

    Raises
    ------
    ValueError
        Another number of devices than ranks, or a device named twice.
    """
    rank, size = communicator.rank, communicator.size
    device_of_rank(rank, size, devices)  # checks that there are as many devices as ranks, and names the cure
    if devices:
        return parse_devices(devices)
    gpus = gpu_count()
    return tuple(device_of_rank(other, size, gpu_count=gpus) for other in range(size))
