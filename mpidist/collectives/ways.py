"""The ways to reduce tensors of one dtype over the ranks of a world, and which of them are worth trying.

A way that goes through the memory of one node, or through two levels, reduces tensors where they lie (`NodeMemory`).
Others are schedules over messages and work on a packed buffer: `Communicator.bind` runs those.
"""

from __future__ import annotations

from typing import NamedTuple

from mpidist.collectives import selection

#: Size of a segment in bytes, and the sizes that are tried: which is best depends on what caches the cores share.
SEGMENT_BYTES, _SEGMENT_SIZES = 1 << 20, (1 << 20, 1 << 19, 1 << 18)

#: From this size in bytes on, ways are tried in the first steps.  Below, segments are so long: a unit of one or two MiB
#: in a single one would be out of cache when it is added.
TRIAL_BYTES, _UNTRIED_BYTES = 1 << 21, 1 << 19


class Way(NamedTuple):
    """An algorithm, and the bytes of a segment where it has segments, else 0."""

    algorithm: str
    segment_bytes: int = 0

    @property
    def label(self) -> str:
        """What ranks must have in common: those that cut differently would read what is not there."""
        size = self.segment_bytes
        return f"{self.algorithm} in segments of {size >> 10} KiB" if size else self.algorithm


#: The sizes of segments to try; all add in the same order.
_VARIANTS = {"shared_memory": _SEGMENT_SIZES, "two_level": (SEGMENT_BYTES,)}

#: The algorithms that work on segments of tensors, which need not be packed.
SEGMENTED = tuple(_VARIANTS)


def worth_trying(nbytes: int, asked: str, facts: selection.Facts) -> list[Way]:
    """Return the ways for a unit of `nbytes`; Local.

    The first one is chosen where none is tried, or none is clearly quicker.

    Parameters
    ----------
    nbytes : int
    asked : str
        An explicit choice is the only way.
    facts : Facts
    """
    chosen = selection.asked_for(nbytes, asked, facts)
    if nbytes < TRIAL_BYTES or asked not in (selection.AUTO, selection.PINNED):
        size = _UNTRIED_BYTES if nbytes < TRIAL_BYTES else SEGMENT_BYTES
        return [Way(chosen, size if chosen in _VARIANTS else 0)]
    names = [chosen]
    if facts.topology.size == 2:  # all algorithms add the same two numbers; of more they add them in different orders
        others = ("ring",) if facts.choices is None else selection.near(nbytes, facts)
        # MPI's own least and greatest may treat NaN in another way.
        names += [name for name in others if name not in (chosen, "native")]
    return [Way(name, size) for name in names for size in _VARIANTS.get(name, (0,))]
