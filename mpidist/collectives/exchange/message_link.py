"""What a `Link` does between devices, over the messages of a transport."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mpidist.collectives.ways.executor import Executor
from mpidist.runtime.control import Watch
from mpidist.schedules.table import algorithm as schedule_of
from mpidist.transports.base import Transport


class MessageLink:
    """Collectives of flat arrays, by one schedule each; methods as those of `Link`, which are over when they return."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def from_root(self, buffer: Any, root: int, watch: Watch) -> None:
        """Give all ranks the array of rank `root`."""
        Executor(schedule_of("broadcast", "binomial"), self._transport, buffer, root=root).run(watch)

    def gather(self, joined: Any, bounds: Sequence[int], watch: Watch) -> None:
        """Give all ranks the parts of all."""
        Executor(schedule_of("all_gather", "ring"), self._transport, joined, bounds=bounds).run(watch)

    def reduce_parts(self, buffer: Any, op: str, bounds: Sequence[int], watch: Watch) -> None:
        """Reduce for each rank its part."""
        Executor(schedule_of("reduce_scatter", "ring"), self._transport, buffer, op, bounds=bounds).run(watch)

    def exchange(
        self,
        gives: Mapping[int, Any],
        places: Mapping[int, Any],
        watch: Watch,
        meanwhile: Callable[[], object] | None = None,
    ) -> None:
        """Send other ranks what they are given, and receive what they give; `meanwhile` is called in between."""
        pending = [self._transport.receive(place, rank) for rank, place in places.items() if len(place)]
        pending += [self._transport.send(given, rank) for rank, given in gives.items() if len(given)]
        if meanwhile is not None:
            meanwhile()
        self._transport.wait(pending, watch)
