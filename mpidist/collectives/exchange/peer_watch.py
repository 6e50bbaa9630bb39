"""What a rank looks at while it waits for one other rank, so that it does not wait forever."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mpidist.collectives.exchange.peer_standoff import AwaitedTransfer, PeerStandoffs
from mpidist.errors import RankFailedError
from mpidist.runtime import board as states
from mpidist.runtime.control import Watch

if TYPE_CHECKING:
    from mpidist.collectives.communicator import Communicator

#: After so many seconds of waiting it may be for ever.
_LONG_SECONDS = 0.5


class PeerWatch(Watch):
    """One eye on the control channel while one rank waits for another.

    Parameters
    ----------
    ranks : Communicator
    waited : AwaitedTransfer
        What this rank waits for.
    standoffs : PeerStandoffs

    Attributes
    ----------
    is_missed : bool
        Whether the function given to `run` raised on another rank: the rank that is waited for may never come.
    """

    __slots__ = ("_waited", "_standoffs", "_peer", "_has_left", "is_missed")

    def __init__(self, ranks: Communicator, waited: AwaitedTransfer, standoffs: PeerStandoffs) -> None:
        super().__init__(ranks.control, waited.what, waited.timeout_seconds, 0)
        self._waited, self._standoffs = waited, standoffs
        self._peer = ranks.transport.world_ranks[waited.peer]  # as the control channel knows it
        self._has_left = self.is_missed = False

    def _look(self, waited: float) -> None:
        super()._look(waited)
        control: Any = self.control
        self.is_missed = any(control.missed.text(rank, control.call + 1) is not None for rank in range(control.size))
        if self._has_left:  # and a look ago too: what it had sent has come since
            name = control.name(self._peer)
            text = f"{name} left (its program ended, or called sys.exit), while this rank is in {self.what}"
            raise control.error(RankFailedError, text, self._peer)
        self._has_left = control.failures.state_of(self._peer)[0] == states.LEFT
        if waited > _LONG_SECONDS and not self.is_missed and not self._waited.is_over:
            standoff = self._standoffs.found(self._waited)
            if standoff is not None:
                raise control.give_up(standoff)

    def _warn(self, waited: float) -> None:
        control = self.control
        limit = f"it fails after {self.timeout_seconds:g} s" if self.timeout_seconds else "it waits without a limit"
        control.warn(f"{self.what} has waited {waited:.0f} s for {control.name(self._peer)}; {limit}")

    def _expire(self, waited: float) -> None:
        control = self.control
        raise control.expire(
            f"{self.what} waited {waited:.1f} s for {control.name(self._peer)}. Each send needs one receive on the "
            "other rank; where two ranks send to each other first, start() one of the two and wait() for it later; "
            "or give more time with timeout_seconds or MPIDIST_TIMEOUT_SECONDS"
        )
