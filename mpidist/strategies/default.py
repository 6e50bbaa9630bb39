"""The default strategy: one replica, nothing distributed; what is current outside of all scopes."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from mpidist import context, transports
from mpidist.cluster.devices import device_of_rank
from mpidist.options import CommunicationOptions, ReduceOp
from mpidist.strategies.base import ReplicaContext, Strategy, StrategyExtended

_made = threading.Lock()
_warned = threading.Lock()


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


class _DefaultExtended(StrategyExtended):
    """Identity throughout; says so once when there are other ranks, which it leaves out."""

    def call_for_each_replica(
        self, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call `fn`: outside of all scopes the code is in a replica context already."""
        return fn(*args, **(kwargs or {}))

    def reduce_arrays(
        self,
        reduce_op: ReduceOp,
        values: list[Any],
        options: CommunicationOptions | None = None,
        destinations: Sequence[Any] | None = None,
    ) -> list[Any]:
        """Return the values."""
        warn_of_other_ranks("the default strategy")
        return values

    def gather_array(self, value: Any, axis: int, options: CommunicationOptions | None = None) -> Any:
        """Return the value."""
        warn_of_other_ranks("the default strategy")
        return value

    def broadcast_to(self, tensor: Any, destinations: Any) -> Any:
        """Return the tensor."""
        warn_of_other_ranks("the default strategy")
        return tensor

    @property
    def worker_devices(self) -> tuple[str, ...]:
        """There are none."""
        raise RuntimeError("worker_devices() is not supported by the default strategy; it distributes nothing")


def warn_of_other_ranks(name: str) -> None:
    """Warn once, on rank 0, when a strategy of one replica is asked to reduce in a world of several ranks.

    Collective at the first call where a launcher started this process (it may start MPI); local otherwise.
    """
    world = transports.world()
    if world.topology.size == 1 or world.transport.rank != 0 or not _warned.acquire(blocking=False):
        return
    warnings.warn(
        f"{name} reduces nothing over the {world.topology.size} ranks of this job: each of them works alone. "
        "Use `with strategy.scope()` and `strategy.run` of a MirroredStrategy or MultiWorkerMirroredStrategy",
        RuntimeWarning,
        stacklevel=5,
    )


STRATEGY = DefaultStrategy()

#: What `mpidist.context` has below every stack.
MODE = context.Mode(STRATEGY, ReplicaContext(STRATEGY, 0))
