"""The warning about devices that a strategy was asked for and that this rank cannot see."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from mpidist import arrays
from mpidist.cluster.devices import Device, invisible_devices

_log = logging.getLogger("mpidist")


def gpu_count() -> int:
    """Return how many GPUs this rank can see.  Local."""
    return len(arrays.list_physical_devices("GPU"))


def warn_of_invisible(devices: Sequence[Device], is_chief: bool) -> None:
    """Log, on the chief, which of `devices` cannot be seen; using them will fail.  Local."""
    if not any(device.kind == "GPU" for device in devices):
        return
    invisible = invisible_devices(devices, gpu_count())
    if invisible and is_chief:
        names = ",".join(device.name for device in invisible)
        _log.warning("Some requested devices in `tf.distribute.Strategy` are not visible to mpidist: %s", names)
