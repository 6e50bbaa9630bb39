"""Which GPU a rank has, for frameworks that work without a strategy."""

from __future__ import annotations

from collections.abc import Callable

from mpidist.cluster.devices import gpu_of_rank
from mpidist.strategies.devices_of_ranks import own_device, take_device
from mpidist.world import world_communicator


def own_gpu(count_fn: Callable[[], int]) -> int | None:
    """Return the number of this rank's GPU among those that it sees, None where it sees none.

    The rule is that of strategies.  The GPU becomes CuPy's current device, and the chief logs the cards of all ranks.
    Without CuPy ranks cannot tell each other what they see; then `count_fn` returns how many GPUs the framework sees.

    Collective at the first call with the ranks of the world in force, Local later.  DeviceError where a rank cannot use
    its GPU.
    """
    communicator = world_communicator()
    if "own_gpu" not in communicator.adapters:
        device = own_device(communicator)
        take_device(device.name, communicator)
        communicator.adapters["own_gpu"] = device.index if device.kind == "GPU" else None
    found: int | None = communicator.adapters["own_gpu"]
    return gpu_of_rank(communicator.topology.local_rank_of[communicator.rank], count_fn()) if found is None else found
