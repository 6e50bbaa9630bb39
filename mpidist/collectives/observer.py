"""`Observer`: who is told what a communicator does, and when.

A communicator asks its observer once for each part that it is made of, and takes what it gets.  This one gives every
part back as it is, so that nothing stands in the way of what nobody watches; `tracing` has one that notes times.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mpidist.collectives.ways.bucket_reduction import BucketReduction, Pipeline
from mpidist.runtime.control import Watch
from mpidist.runtime.trace import Trace
from mpidist.runtime.turnstile import BaseTurnstile
from mpidist.transports.base import Transport


class Observer:
    """An observer that notes nothing.  All methods are Local."""

    @property
    def trace(self) -> Trace | None:
        """Where it notes what this rank does; None where it does not."""
        return None

    def transport(self, transport: Transport) -> Transport:
        """Return the transport of the ranks."""
        return transport

    def turnstile(self, turnstile: BaseTurnstile) -> BaseTurnstile:
        """Return what every collective call goes through."""
        return turnstile

    def begin(self, begin: Callable[..., Watch]) -> Callable[..., Watch]:
        """Return what begins calls, see `CallCheck.begin`."""
        return begin

    def function(self, kind: int, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function; `kind` says what it does, see `runtime.trace_kinds`."""
        return fn

    def stripe(self, kind: int, fn: Callable[[Any, Sequence[Any]], None]) -> Callable[[Any, Sequence[Any]], None]:
        """Return what packs or hands out a stripe, ``fn(stripe, tensors)``."""
        return fn

    def reduction(self, reduction: BucketReduction) -> BucketReduction:
        """Return the reduction of a bucket."""
        return reduction

    def pipeline(self, pipeline: Pipeline) -> Pipeline:
        """Return what reduces a buffer span by span."""
        return pipeline

    def wave(self, index: int, is_back: bool) -> None:
        """Take note that wave `index` of the call goes to the other nodes, or is back."""


#: Notes nothing.
NOBODY = Observer()
