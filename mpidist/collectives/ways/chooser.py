"""Which way a rank takes for an all-reduce: the call, the settings and the rules of selection decide."""

from __future__ import annotations

from dataclasses import replace

from mpidist.collectives.ways import selection
from mpidist.collectives.ways.selection import AUTO, FREE, PINNED, SEGMENTED, Choices, Facts, Way
from mpidist.options import Settings

#: Sizes in bytes from which on a pack is closed: never where segments are the unit of work; as a message otherwise.
ONE_PACK, _MESSAGE_PACK = 1 << 62, 1 << 22


class Chooser:
    """Chooses ways for one rank; the same on all ranks.

    `facts` are without choices.  `room` is the longest segment in bytes where ranks have less of each other's memory
    than the table asks for; `moves_device`: the transport moves arrays in device memory by itself.  `choices` follow
    from measurements, if a user asked for some.
    """

    def __init__(self, facts: Facts, settings: Settings, room: int | None = None, moves_device: bool = False) -> None:
        self.choices: Choices | None = None
        self._moves_device = moves_device
        self._facts = facts
        self._room = room
        self._forced = settings.algorithm
        if self._forced == AUTO and settings.deterministic:
            self._forced = PINNED

    def facts(self, on_host: bool = True) -> Facts:
        """Return what the choice of an algorithm depends on; Local."""
        known = replace(self._facts, choices=self.choices)
        if on_host or self._moves_device:
            return known if on_host else replace(known, has_segments=False)
        return replace(known, choices=None, on_device=True)

    def asked(self, algorithm: str | None) -> str:
        """Return what is asked for: by a call, else by the settings; those win over a pinned choice, or pin it."""
        forced = self._forced
        pins = algorithm in (AUTO, PINNED) and forced != AUTO and PINNED in (algorithm, forced)
        return forced if algorithm is None or pins else algorithm

    def way(self, nbytes: int, algorithm: str | None, on_host: bool = True) -> Way:
        """Return the way of a unit of `nbytes`; an explicit choice wins.  Local.

        ValueError where there is no such algorithm here.
        """
        asked = self.asked(algorithm)
        if self._facts.topology.size == 1:
            selection.check_name(asked)
            return Way("none")
        found = selection.way(nbytes, asked, self.facts(on_host))
        return found if self._room is None else found._replace(segment_bytes=min(found.segment_bytes, self._room))

    def by_messages(self, nbytes: int, algorithm: str | None) -> str:
        """Return the algorithm over messages for a buffer of `nbytes`; Local."""
        if self._facts.topology.size == 1 or not nbytes:
            return "none"
        return selection.asked_for(nbytes, self.asked(algorithm), replace(self.facts(), has_segments=False))

    def bytes_per_pack(self, algorithm: str | None, on_host: bool = True) -> int:
        """Return from what size in bytes on a pack is closed when the user leaves it to us; Local."""
        asked = self.asked(algorithm)
        has_segments = self._facts.has_segments and asked in (*FREE, PINNED, *SEGMENTED)
        if has_segments or self.facts(on_host).on_device:
            return ONE_PACK
        return self.choices.bucket_bytes if self.choices is not None and asked in FREE else _MESSAGE_PACK
