"""Waits on connections: who of the peers is still there, and how long a loop may find nothing to do."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from mpidist.errors import MpidistError, PeerLostError, RankFailedError
from mpidist.runtime import board as states
from mpidist.runtime.control import ControlChannel
from mpidist.runtime.failures import ENDED, last_line
from mpidist.runtime.watch import limit_text, yield_processor

if TYPE_CHECKING:
    from mpidist.transports.connections.base import Connection

#: Turns of a waiting loop between two looks at the alarm word, and seconds between two looks at processes and clock.
_LOOK_TURNS = 64
_ALARM_SECONDS, _LOOK_SECONDS = 0.002, 0.05
#: Seconds of waiting after which a rank sleeps between looks, and for how long.
_SPIN_SECONDS, _NAP_SECONDS = 0.02, 0.0002


class Presence:
    """Which of the peers are still there; one a rank, for all connections that were opened together."""

    def __init__(self, control: ControlChannel, world_ranks: Sequence[int]) -> None:
        self.control = control
        self.connections: list[Connection] = []
        #: Called when this rank has waited for a moment.
        self.while_waiting: list[Callable[[], object]] = []
        self._world_ranks = tuple(world_ranks)
        self._looked = self._looked_at_alarm = 0.0

    def name_of(self, peer: int) -> int:
        """Return by which rank the control channel knows a peer."""
        return self._world_ranks[peer]

    def forget(self, connection: Connection) -> None:
        """Watch a connection no more."""
        if connection in self.connections:
            self.connections.remove(connection)

    def look(self) -> bool:
        """Look now and then which peers have ended, and tell the connections; return whether it looked.  Local."""
        now = time.monotonic()
        thorough = now - self._looked > _LOOK_SECONDS
        if not thorough and not (self.control.board.alarm and now - self._looked_at_alarm > _ALARM_SECONDS):
            return False
        self._looked_at_alarm = now
        if thorough:
            self._looked = now
            if self.control.arbiter is not None:
                self.control.arbiter.poll()
        for connection in self.connections:
            if not connection.gone:
                why = self.end_of(connection.peer, thorough)
                if why:
                    connection.lose(why)
        return True

    def end_of(self, peer: int, thorough: bool = True) -> str:
        """Return how a peer has ended, empty if it has not; its process is looked for if `thorough`.  Local."""
        control, rank = self.control, self.name_of(peer)
        state, text = control.failures.state_of(rank)
        if state == states.LEFT:
            return "left"
        if state in ENDED:
            return f"failed: {last_line(text)}"
        if thorough and rank in control.board_ranks:
            index = control.board_ranks.index(rank)
            if not control.board.alive(index):
                return f"died: its process {control.board.pids[index]} is gone (killed, or out of memory)"
        return ""


class Patience:
    """The pause of a loop that has nothing to do: lets others run, and looks which peers are still there.

    If one of the `connections` is lost, the wait is in vain.  `what` is for messages, such as
    ``"rank 3 waits for ps 0 (rank 5) to apply its push 17"``.  The deadline counts from the first turn after `reset`;
    None means the default of the settings, 0 never.

    `idle` is for loops that wait for whatever comes, from anybody, for ever: no deadline, no warning, and no error for
    a connection that is lost, whose owner asks `Connection.lost` itself.  `warns`: a long wait is told; by default all
    but idle ones.
    """

    __slots__ = ("what", "_connections", "_presence", "_timeout", "_idle", "_turns", "_start", "_warned", "_yield")

    def __init__(
        self,
        connections: Iterable[Connection],
        what: str,
        timeout_seconds: float | None = None,
        idle: bool = False,
        warns: bool | None = None,
    ) -> None:
        self._connections = list(connections)
        self._presence = self._connections[0].presence
        settings = self._presence.control.settings
        self._timeout = 0.0 if idle else settings.timeout_seconds if timeout_seconds is None else timeout_seconds
        self._yield = self._presence.control.pause or yield_processor()
        self._idle = idle
        self.what = what
        self._turns, self._warned = 0, idle if warns is None else not warns
        self._start: float | None = None

    def reset(self) -> None:
        """Begin anew: something came.  Local."""
        self._start = None  # turns go on: who waits often and never for long must look around, too

    def tick(self) -> bool:
        """Be called in every turn of a waiting loop that found nothing; return whether it looked around.  Local.

        Errors as for `Connection.wait`.
        """
        self._yield()
        self._turns = turns = self._turns + 1
        if turns % _LOOK_TURNS:
            return False
        now = time.monotonic()
        if self._start is None:
            self._start = now
        waited = now - self._start
        self.look()
        if waited > _SPIN_SECONDS:
            time.sleep(_NAP_SECONDS)
            self._turns = turns + _LOOK_TURNS - 1  # a nap is as long as many turns
            self._mind_the_clock(waited)
        return True

    def look(self) -> None:
        """Look around, as `tick` does now and then; errors as there.  Local."""
        for connection in self._presence.connections:
            connection.take_in()  # so that nobody waits for this rank to make room
        for act in self._presence.while_waiting:
            act()
        if self._presence.look():
            self._judge()

    def _judge(self) -> None:
        """Raise if the wait is in vain."""
        control = self._presence.control
        watch = control.watch(f"this wait: {self.what}")
        tolerant = control.settings.fault_tolerant
        error = control.failures.vital(watch) if tolerant else control.failures.first(watch)
        if error is not None:
            raise control.breaks(error)
        if not self._idle:
            for connection in self._connections:
                if connection.lost:
                    raise self.lost(connection)

    def lost(self, connection: Connection) -> MpidistError:
        """Return what to raise because the peer of `connection` is gone."""
        control = self._presence.control
        rank = self._presence.name_of(connection.peer)
        text = f"{self.what}: {control.name(rank)} {connection.gone}"
        return control.error(PeerLostError if control.settings.fault_tolerant else RankFailedError, text, rank)

    def _mind_the_clock(self, waited: float) -> None:
        control = self._presence.control
        if not self._warned and 0 < control.settings.warn_seconds < waited:
            self._warned = True
            control.warn(f"{self.what}, for {waited:.0f} s by now; {limit_text(self._timeout)}")
        if 0 < self._timeout < waited:
            raise control.expire(
                f"{self.what}: nothing came in {waited:.1f} s. Look at what that rank does (py-spy dump), or give more "
                "time with MPIDIST_TIMEOUT_SECONDS"
            )
