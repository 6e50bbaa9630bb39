"""What chief and workers say to each other: pickled tuples over a connection, long ones through memory that is kept.

Large arrays in them are not pickled: they lie behind the text, and the header has the lengths.

Only small facts and what users pass or return travel here; variables and gradients go to the servers, unpickled.
"""

from __future__ import annotations

import enum
import pickle
from typing import Any

import numpy

from mpidist.errors import MpidistError
from mpidist.parameter_server.coordinator import packed
from mpidist.runtime.control import ControlChannel
from mpidist.transports.connections.base import Area, Connection, Message
from mpidist.transports.connections.waiting import Patience

#: What is longer goes through an area: the ring of a connection would be full of it, and the sender would wait.
_LONG_BYTES = 1 << 14
#: Areas are made in sizes of 2 to the power of n, of which this is the smallest.
_SMALLEST_AREA_BYTES = 1 << 16


class Topic(enum.IntEnum):
    """What a message is about: its first item."""

    #: To a worker: number of the batch, numbers of the functions, arguments, definitions of functions that are new.
    CALLS = 0
    #: To a worker: number of a function that it does not have, and its definition by value.
    DEFINE = 1
    #: To a worker: number, and the definition of a data set, or of a function that makes one.
    DATASET = 2
    #: To a worker: number of an iterator, and of its data set.
    ITERATOR = 3
    #: To a worker: numbers of functions, and of data sets and iterators, that are not needed any more.
    FORGET = 4
    #: To a worker: calls of batches up to this one are not to be begun.
    CANCEL = 5
    #: To a worker: there is no more to do.
    END = 6
    #: To a worker: number of a server that is gone.
    SERVER_LOST = 9
    #: To a worker: servers of variables that were moved, by key.
    MOVED = 10
    #: To a worker: variables are those of a checkpoint now.
    RESTORED = 12
    #: To the chief: number of a server that is gone; the worker has done with all that it had begun.
    QUIET = 11
    #: To the chief: number of the batch, seconds it took, results, failure.
    RESULTS = 7
    #: To the chief: number of a function that the worker does not have, and why.
    UNKNOWN = 8


class Conversation:
    """One end of the talk between the chief and a worker."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self._areas: list[Area] = []

    def say(self, *content: Any) -> None:
        """Send a kind and what belongs to it.  Local; does not wait for the other to listen."""
        text, buffers = packed.parted(content)
        if len(text) <= _LONG_BYTES and not buffers:
            self.connection.send(text)
            return
        pieces = [text, *buffers]
        lengths = numpy.array([len(piece) for piece in pieces], numpy.int64)
        where = packed.places(lengths.tolist())
        area = self._free_area(where[-1].stop)
        packed.fill(area.array, pieces, where)
        self.connection.send(lengths.tobytes(), area, where[-1].stop)

    def hear(self) -> tuple[Any, ...] | None:
        """Return what the other has said next, None if it has said nothing.  Local; never waits."""
        message = self.connection.receive()
        return None if message is None else _content(message)

    @property
    def peer_name(self) -> str:
        """How messages call the other."""
        return f"rank {self.connection.presence.name_of(self.connection.peer)}"

    @property
    def control(self) -> ControlChannel:
        """What warns, by its settings."""
        return self.connection.presence.control

    @property
    def is_lost(self) -> bool:
        """Whether the other has ended, and all that it said has been heard.  Local."""
        return self.connection.lost

    def lost(self, what: str) -> MpidistError:
        """Return what to raise because the other has ended, in the middle of `what`."""
        return Patience([self.connection], what).lost(self.connection)

    def patience(self, what: str) -> Patience:
        """Return what a loop calls that waits for this or any other conversation of the rank."""
        return Patience([self.connection], what, idle=True)

    def _free_area(self, nbytes: int) -> Area:
        """Return an area of so many bytes that the other has done with, a new one if there is none."""
        for area in self._areas:
            if not area.busy and area.array.size >= nbytes:
                return area
        for area in [area for area in self._areas if not area.busy]:  # too small: a larger one takes its place
            self._areas.remove(area)
            area.close()
        area = self.connection.area(max(_SMALLEST_AREA_BYTES, 1 << (nbytes - 1).bit_length()))
        self._areas.append(area)
        return area


def _content(message: Message) -> tuple[Any, ...]:
    if message.payload is None:
        return pickle.loads(message.header)
    try:
        lengths = numpy.frombuffer(message.header, numpy.int64)
        return packed.joined(message.payload, packed.places(lengths.tolist()))
    finally:
        message.release()
