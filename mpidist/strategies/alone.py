"""`LoneExtended`: one replica that leaves out the other ranks of its job, and says so."""

from __future__ import annotations

import sys
import threading
import warnings
from pathlib import Path

from mpidist import transports
from mpidist.strategies.extended import StrategyExtended

_warned = threading.Lock()
#: Where mpidist is: the line that matters to a user is outside of it.
_PACKAGE = str(Path(__file__).parents[1])


class LoneExtended(StrategyExtended):
    """Gives back what is to be reduced; warns once when there are other ranks, which it leaves out."""

    title = ""

    def _before_collective(self) -> None:
        """Warn once, on rank 0, when a strategy of one replica is asked to reduce in a world of several ranks."""
        world = transports.world()
        if world.topology.size == 1 or world.transport.rank != 0 or not _warned.acquire(blocking=False):
            return
        warnings.warn(
            f"{self.title} reduces nothing over the {world.topology.size} ranks of this job: each of them works alone. "
            "Use `with strategy.scope()` and `strategy.run` of a MirroredStrategy or MultiWorkerMirroredStrategy",
            RuntimeWarning,
            stacklevel=_frames_inside(),
        )


def _frames_inside() -> int:
    """Return the stack level, for the caller's `warnings.warn`, of the line outside of mpidist."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame, level = frame.f_back, level + 1
    return level
