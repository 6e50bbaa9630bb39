"""`OneDeviceStrategy`: everything on one device; for trying out code that is to be distributed later."""

from __future__ import annotations

from mpidist import transports
from mpidist.cluster.devices import Device, parse_device
from mpidist.strategies.alone import LoneExtended
from mpidist.strategies.base import Strategy
from mpidist.strategies.devices_of_ranks import warn_of_invisible


class OneDeviceStrategy(Strategy):
    """One replica on the device named; scopes and contexts are those of a distributed strategy.

    Local: ranks that make one each work alone, of which the first reduction warns.

    Parameters
    ----------
    device : str or Device
        Such as ``"/cpu:0"`` or ``"/gpu:0"``.

    Raises
    ------
    ValueError
        The name means no device of this machine.
    """

    def __init__(self, device: str | Device) -> None:
        parsed = parse_device(device)
        self.extended = _OneDeviceExtended(self, parsed.name)
        warn_of_invisible([parsed], is_chief=transports.world().transport.rank == 0)


class _OneDeviceExtended(LoneExtended):
    title = "OneDeviceStrategy"
