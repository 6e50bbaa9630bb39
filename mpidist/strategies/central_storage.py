"""`CentralStorageStrategy`: the ranks of one node train together on one copy of the variables."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from mpidist import arrays
from mpidist.cluster.devices import Device, parse_device
from mpidist.collectives.communicator import Communicator
from mpidist.cross_device_ops import AllReduceCrossDeviceOps
from mpidist.options import VariableSynchronization
from mpidist.strategies.base import MirroredExtended, Strategy
from mpidist.strategies.devices_of_ranks import devices_of_ranks, require_one_node, warn_of_invisible
from mpidist.variables import AggregatingVariable, DistributedVariable, OneCopy
from mpidist.world import launched_communicator

_log = logging.getLogger("mpidist")


class CentralStorageStrategy(Strategy):
    """Synchronous training on the devices of one machine that share one copy of each variable.

    Every rank is a replica.  Variables, and what optimizers keep of them, lie in memory of the host that all ranks see:
    they take as much of it on eight ranks as on one.  Gradients are summed, and then applied once, by all ranks
    together, each its part.

    Collective: every rank makes it in the same order.  Logs its devices.

    Parameters
    ----------
    compute_devices : sequence of str, optional
        Local rank i takes ``compute_devices[i]``.  By default, and for an empty list, GPU i if there are GPUs, else
        CPU i.
    parameter_device : str, optional
        Where variables are: a CPU, as is the default.  One rank alone may name its own device, and has its variables
        there by default.

    Raises
    ------
    ValueError
        Another number of devices than ranks, or one named twice; a parameter device that not all ranks can see.
    RuntimeError
        The ranks are on more than one node, or share no memory.
    """

    def __init__(
        self, compute_devices: Sequence[str | Device] | None = None, parameter_device: str | Device | None = None
    ) -> None:
        communicator = launched_communicator()
        require_one_node(communicator, type(self).__name__)
        all_devices = devices_of_ranks(compute_devices, communicator)
        place = _parameter_device(parameter_device, all_devices)
        if communicator.size > 1 and communicator.segments is None:
            raise RuntimeError(
                f"rank {communicator.rank} of {communicator.size}: CentralStorageStrategy keeps variables in memory "
                "that the ranks of a node share, and these share none: MPIDIST_SHARED_MEMORY=0 forbids it, or they run "
                "in containers that cannot see each other. MirroredStrategy needs no shared memory"
            )
        self.extended = CentralStorageExtended(self, communicator, [each.name for each in all_devices], place.name)
        warn_of_invisible(all_devices, is_chief=communicator.rank == 0)
        if communicator.rank == 0:
            names = self.extended.worker_devices
            _log.info(
                "Using CentralStorageStrategy with compute_devices = %r, parameter_device = %r", names, place.name
            )


class CentralStorageExtended(MirroredExtended):
    """Replicas that share one copy of each variable."""

    is_one_worker = True

    def __init__(
        self, strategy: Strategy, communicator: Communicator, device_names: Sequence[str], parameter_device: str
    ) -> None:
        names = tuple(device_names)
        super().__init__(strategy, communicator, names[communicator.rank], names, AllReduceCrossDeviceOps())
        # One rank has one copy of everything anyway.
        self._one_copy = OneCopy(communicator) if communicator.size > 1 else None
        self.has_one_copy = self._one_copy is not None
        self._parameter_device = parameter_device

    @property
    def parameter_devices(self) -> tuple[str, ...]:
        """The device that holds the variables."""
        return (self._parameter_device,)

    def new_variable(self, storage: Any, **attributes: Any) -> DistributedVariable:
        """Return a variable that begins with the chief's `storage`: one for all ranks, unless copies may differ."""
        one_copy = self._one_copy
        if one_copy is None or attributes["synchronization"] is VariableSynchronization.ON_READ:
            return super().new_variable(storage, **attributes)
        shared = one_copy.empty(storage.shape, storage.dtype, f"Variable {attributes['name']!r}")
        variable = AggregatingVariable(shared, one_copy=one_copy, strategy=self._strategy, **attributes)
        variable.begin_with(arrays.on_host(storage))
        return variable


def _parameter_device(asked: str | Device | None, compute_devices: Sequence[Device]) -> Device:
    """Return where variables are."""
    only = compute_devices[0] if len(compute_devices) == 1 else None
    if asked is None:
        return only or Device("CPU", 0)
    device = parse_device(asked)
    if device.kind != "CPU" and device != only:
        raise ValueError(
            f"parameter_device {device.short_name} holds what only one rank sees, and {len(compute_devices)} are to "
            f"share it; the ranks' devices are {', '.join(each.short_name for each in compute_devices)}. Name a CPU, "
            "or leave it out"
        )
    return device
