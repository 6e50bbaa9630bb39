"""The default strategy: one replica, nothing distributed; what is current outside of all scopes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from mpidist import context
from mpidist.cluster.devices import device_of_rank
from mpidist.context import T
from mpidist.strategies.alone import LoneExtended
from mpidist.strategies.base import ReplicaContext, Strategy

_made = threading.Lock()


class DefaultStrategy(Strategy):
    """The strategy of code that asked for none; `mpidist.get_strategy` returns it.  There is one.

    `run` calls its function, `reduce` and `gather` give back what they get, variables are plain.  Library code can use
    it like any other strategy.

    Raises
    ------
    RuntimeError
        A second one is made.
    """

    def __init__(self) -> None:
        if not _made.acquire(blocking=False):
            raise RuntimeError("Should only create a single instance of DefaultStrategy; get_strategy() returns it")
        self.extended = _DefaultExtended(self, device_of_rank(0, 1).name)

    @contextmanager
    def _scope(self) -> Iterator[Strategy]:
        if context.has_strategy():
            raise RuntimeError("Must not nest tf.distribute.Strategy scopes.")
        yield self

    def __deepcopy__(self, memo: dict[int, Any]) -> Strategy:
        return self

    def __reduce__(self) -> str:
        """Pickle as a reference: what comes out of a pickle belongs to the one there is."""
        return "STRATEGY"


class _DefaultExtended(LoneExtended):
    """Identity throughout."""

    title = "the default strategy"
    is_for_training = False

    def call_for_each_replica(
        self, fn: Callable[..., T], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> T:
        """Call `fn`: outside of all scopes the code is in a replica context already."""
        return fn(*args, **(kwargs or {}))

    @property
    def worker_devices(self) -> tuple[str, ...]:
        """There are none."""
        raise RuntimeError("worker_devices() is not supported by the default strategy; it distributes nothing")


STRATEGY = DefaultStrategy()
STRATEGY.extended.made_in = None  # wherever it was asked for first

#: What `mpidist.context` has below every stack.
MODE = context.Mode(STRATEGY, ReplicaContext(STRATEGY, 0))
