"""`MirroredStrategy`: the ranks of one node train together."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from mpidist.cluster.devices import Device
from mpidist.cross_device_ops import AllReduceCrossDeviceOps, CrossDeviceOps
from mpidist.strategies.base import MirroredExtended, Strategy
from mpidist.strategies.devices_of_ranks import devices_of_ranks, require_one_node, warn_of_invisible
from mpidist.world import launched_communicator

_log = logging.getLogger("mpidist")


class MirroredStrategy(Strategy):
    """Synchronous training on the devices of one machine: every rank is a replica, variables are on all of them.

    Collective: every rank makes it in the same order.  Logs ``Using MirroredStrategy with devices (...)``.

    Parameters
    ----------
    devices : sequence of str, optional
        Local rank i takes ``devices[i]``.  By default, and for an empty list, GPU i if there are GPUs, else CPU i.
    cross_device_ops : CrossDeviceOps, optional
        How values are reduced; by default the algorithm is chosen for each size.

    Raises
    ------
    ValueError
        Another number of devices than ranks, or a device named twice.
    RuntimeError
        The ranks are on more than one node.
    """

    def __init__(
        self, devices: Sequence[str | Device] | None = None, cross_device_ops: CrossDeviceOps | None = None
    ) -> None:
        communicator = launched_communicator()
        require_one_node(communicator, "MirroredStrategy")
        all_devices = devices_of_ranks(devices, communicator)
        names = tuple(device.name for device in all_devices)
        self.extended = MirroredExtended(
            self,
            communicator,
            names[communicator.rank],
            names,
            AllReduceCrossDeviceOps() if cross_device_ops is None else cross_device_ops,
        )
        self.extended.is_one_worker = True
        warn_of_invisible(all_devices, is_chief=communicator.rank == 0)
        if communicator.rank == 0:
            _log.info("Using MirroredStrategy with devices %r", names)
