"""What a device is asked about all gradients of a step, and its answer, which comes later."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from mpidist.device.waiting import wait_for

if TYPE_CHECKING:
    import numpy

    from mpidist.device.memory import Arrived


class Limits(NamedTuple):
    """What is asked of all gradients of a step before one of them is applied.

    They are multiplied, besides the factors of their steps, so that their norm times `factor` is within `norm`, if it
    is a number: the norm of each if `is_each`, otherwise that of all together.  Where one has an infinity or a NaN, the
    step is left out if it `skips_nonfinite`; where not, a norm that is not finite makes them NaN.
    """

    factor: float
    norm: float | None
    is_each: bool
    skips_nonfinite: bool


class Answer:
    """Whether any of `flags`, in host memory, is not 0, once they have `arrived`."""

    def __init__(self, arrived: Arrived, flags: numpy.ndarray) -> None:
        self._arrived, self._flags = arrived, flags

    def __call__(self) -> bool:
        """Return it, when the device has given it; errors as for `wait_for`."""
        wait_for(self._arrived)
        return bool(self._flags.any())
