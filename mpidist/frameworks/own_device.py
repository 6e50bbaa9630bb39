"""Which GPU a rank has, for frameworks that work without a strategy."""

from __future__ import annotations

from collections.abc import Callable

from mpidist import context
from mpidist.cluster.devices import gpu_of_name, gpu_of_rank
from mpidist.strategies.devices_of_ranks import OWN_DEVICE, forget_gpus, gpu_count, own_device, take_device
from mpidist.world import world_communicator


def own_gpu(count_fn: Callable[[], int]) -> int | None:
    """Return the number of this rank's GPU among those that it sees, None where it has none.

    In the scope of a strategy it is the strategy's.  Elsewhere it is chosen as by default there, and becomes CuPy's
    current device, and the chief logs the cards of all ranks.  Without CuPy ranks cannot tell each other what they see;
    then `count_fn` returns how many GPUs the framework sees.

    Collective at the first call with the ranks of the world in force, Local later and in a scope.  DeviceError where a
    rank cannot use its GPU.
    """
    communicator = world_communicator()
    if context.has_strategy():
        name = context.get_strategy().extended.device_name
    elif OWN_DEVICE in communicator.adapters:
        name = communicator.adapters[OWN_DEVICE]
    else:
        name = own_device(communicator).name
        take_device(name, communicator)
        communicator.adapters[OWN_DEVICE] = name
        forget_gpus(communicator)  # a strategy may have ranks that want none
    if gpu_count():
        return gpu_of_name(name)
    return gpu_of_rank(communicator.topology.local_rank_of[communicator.rank], count_fn())
