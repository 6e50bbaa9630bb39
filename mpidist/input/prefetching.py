"""Elements made ahead of time in a thread, which ends when the iterator is dropped."""

from __future__ import annotations

import os
import queue
import threading
import weakref
from collections.abc import Iterator
from typing import Any

#: A thread that waits for room looks so often for the end of its iterator.
_LOOK_SECONDS = 0.1


def prefetched(elements: Iterator[Any], count: int) -> Iterator[Any]:
    """Return an iterator over the same elements, `count` of them made ahead of time; 0 returns the iterator itself."""
    return elements if count == 0 else Prefetcher(elements, count)


class Prefetcher(Iterator[Any]):
    """An iterator whose elements a thread makes ahead of time."""

    def __init__(self, elements: Iterator[Any], count: int) -> None:
        self._ready: queue.Queue[tuple[str, Any]] = queue.Queue(count)
        self._ended = False
        stop = threading.Event()
        # the thread must not refer to this object, or it would never be dropped
        arguments = (elements, self._ready, stop)
        self.thread = threading.Thread(target=_fill, args=arguments, name="mpidist-prefetch", daemon=True)
        self._close = weakref.finalize(self, _stop, stop, os.getpid())
        self.thread.start()

    def __next__(self) -> Any:
        if self._ended:
            raise StopIteration
        kind, value = self._ready.get()
        if kind == "element":
            return value
        self._ended = True
        if kind == "error":
            raise value
        raise StopIteration

    def close(self) -> None:
        """Stop the thread; there are no more elements then."""
        self._ended = True
        self._close()


def _stop(stop: threading.Event, process: int) -> None:
    """Stop the thread; a forked child has none, and might find the event locked."""
    if os.getpid() == process:
        stop.set()


def _fill(elements: Iterator[Any], ready: queue.Queue[tuple[str, Any]], stop: threading.Event) -> None:
    try:
        for element in elements:
            if not _put(ready, ("element", element), stop):
                return
        _put(ready, ("end", None), stop)
    except BaseException as error:  # whatever it is, it belongs to who asks for the element
        _put(ready, ("error", error), stop)


def _put(ready: queue.Queue[tuple[str, Any]], entry: tuple[str, Any], stop: threading.Event) -> bool:
    """Hand an entry over; False when nobody wants it any more."""
    while not stop.is_set():
        try:
            ready.put(entry, timeout=_LOOK_SECONDS)
            return True
        except queue.Full:
            continue
    return False
