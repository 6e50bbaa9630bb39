"""`ReplicaCollectives`: the collectives of a replica context besides all_reduce and all_gather."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from mpidist import context
from mpidist.arrays import plain
from mpidist.collectives.exchange.point_to_point import BoundReceive, BoundSend
from mpidist.collectives.persistent_collective import PersistentCollective
from mpidist.collectives.structures import leaf_by_leaf, of_leaves
from mpidist.options import CommunicationOptions, ReduceOp
from mpidist.strategies.bound_collectives import BoundCollectives
from mpidist.variables.components import dense_component

if TYPE_CHECKING:
    from mpidist.collectives.communicator import Communicator
    from mpidist.strategies.base import Strategy
    from mpidist.strategies.extended import StrategyExtended


class ReplicaCollectives(BoundCollectives):
    """Collectives over the replicas of a strategy, for the code inside `Strategy.run`.

    Values are this replica's; results are new arrays, the caller's own.  Options that are set win over the strategy's.
    Methods that end in ``_init`` bind a collective to the shapes and dtypes of a value.  What they return is called, or
    started and waited for, with values like it.

    All of them raise RuntimeError outside of this replica, and CollectiveMismatchError on all replicas where these make
    different calls, or pass arrays of different dtypes or shapes.

    Attributes
    ----------
    strategy : Strategy
    """

    if TYPE_CHECKING:  # hints find it in `ReplicaContext`
        strategy: Strategy

    def _here(self) -> StrategyExtended:
        context.require_replica(self)
        return self.strategy.extended

    def _ranks(self) -> Communicator:
        return self._here().collectives

    def _timeout(self, options: CommunicationOptions | None) -> float | None:
        return self.strategy.extended.timeout_seconds(options)

    def broadcast(self, value: Any, root: int = 0, options: CommunicationOptions | None = None) -> Any:
        """Return the value of replica `root`.

        Collective: every replica calls it in the same order, with values of the same structure, shapes and dtypes.

        Parameters
        ----------
        value : array or number, or nested tuples, lists and dicts of them
        root : int
        options : CommunicationOptions, optional

        Raises
        ------
        ValueError
            There is no replica `root`.
        """
        context.require_replica(self)
        return broadcast_value(self.strategy.extended, value, root, options)

    def reduce_scatter(self, reduce_op: ReduceOp | str, value: Any, options: CommunicationOptions | None = None) -> Any:
        """Return this replica's rows of the reduced value: of n rows, those from r * n // R to (r + 1) * n // R.

        Collective: every replica calls it in the same order, with values of the same structure, shapes and dtypes.

        Parameters
        ----------
        reduce_op : ReduceOp or str
            SUM, MEAN, MIN, MAX or PRODUCT, also by name in any case.
        value : array of at least one dimension, or nested tuples, lists and dicts of them
        options : CommunicationOptions, optional

        Raises
        ------
        ValueError
            A scalar.
        UnsupportedDtypeError
            The dtype has no such reduction.
        """
        ranks, op, seconds = self._ranks(), ReduceOp.parse(reduce_op).verb, self._timeout(options)
        return by_leaf(
            ranks, "reduce_scatter", seconds, value, lambda leaf, paths: ranks.reduce_scatter(leaf, op, seconds, paths)
        )

    def gather(self, value: Any, root: int = 0, axis: int = 0, options: CommunicationOptions | None = None) -> Any:
        """Return the values of all replicas joined along `axis`, in replica order, on replica `root`; None on others.

        Collective: every replica calls it in the same order.

        Parameters
        ----------
        value : array of at least one dimension, or nested tuples, lists and dicts of them
            Replicas may differ in the length of `axis`, text in its width, and in nothing else.
        root, axis : int
        options : CommunicationOptions, optional

        Raises
        ------
        ValueError
            A scalar, `axis` out of range, or no such replica.
        """
        ranks, seconds = self._ranks(), self._timeout(options)
        return by_leaf(
            ranks, "gather", seconds, value, lambda leaf, paths: ranks.gather(leaf, root, axis, seconds, paths)
        )

    def all_to_all(
        self, value: Any, splits: Sequence[int] | None = None, options: CommunicationOptions | None = None
    ) -> tuple[Any, list[int]]:
        """Send rows to every replica; return those that every replica has sent to this one, and how many each gave.

        Collective: every replica calls it in the same order.

        Parameters
        ----------
        value : array of at least one dimension
            Its first rows are for replica 0, the next ones for replica 1, and so on.  Text has one width on all
            replicas.
        splits : sequence of int, optional
            How many rows each replica gets, 0 included; by default all get as many.
        options : CommunicationOptions, optional

        Raises
        ------
        ValueError
            A scalar; splits that are negative, too many or too few, or that do not add up; before any communication.
        """
        return self._ranks().all_to_all(dense_component(value, "all_to_all"), splits, self._timeout(options))

    def send(self, value: Any, to: int, options: CommunicationOptions | None = None) -> None:
        """Send an array to replica `to`, which receives it.  Local, but for that one.

        It returns when the other replica has received the array, or when a short one is on its way.  Replicas that send
        to each other first start one of the two: see `send_init`.

        Raises
        ------
        ValueError
            There is no such replica, or it is this one.
        TransportTimeoutError, RankFailedError, RemoteReplicaError
            The other replica did not come, and why as far as it is known.
        """
        self._ranks().send(dense_component(value, "send"), to, self._timeout(options))

    def receive(self, source: int, like: Any = None, options: CommunicationOptions | None = None) -> Any:
        """Return the next array that replica `source` sends to this one.  Local, but for that one.

        Parameters
        ----------
        source : int
        like : array, optional
            What is expected: another dtype or shape is a CollectiveMismatchError here.  What comes is put into memory
            of its kind; without it, into the host's.
        options : CommunicationOptions, optional

        Raises
        ------
        ValueError, TransportTimeoutError, RankFailedError, RemoteReplicaError
            As for `send`.
        """
        expected = None if like is None else dense_component(like, "receive")
        return self._ranks().receive(source, expected, self._timeout(options))

    def barrier(self, options: CommunicationOptions | None = None) -> None:
        """Return when all replicas have come here.  Collective: every replica calls it in the same order."""
        self._ranks().barrier(timeout_seconds=self._timeout(options))

    # -- bound ----------------------------------------------------------------------------------------------------

    def gather_init(
        self, like: Any, root: int = 0, axis: int = 0, options: CommunicationOptions | None = None
    ) -> PersistentCollective:
        """Return the `gather` of values like this one, of any length of `axis`.  Local.

        Text has one width on all replicas.
        """
        return self._bound("gather", (root, axis), like, options)

    def send_init(self, like: Any, to: int) -> BoundSend:
        """Return the `send` of arrays like this one: its ``start`` sends, and returns what is waited for.  Local."""
        return self._ranks().send_init(dense_component(like, "send"), to)

    def receive_init(self, like: Any, source: int) -> BoundReceive:
        """Return the `receive` of arrays like this one, which may be started before they are sent.  Local."""
        return self._ranks().receive_init(dense_component(like, "receive"), source)


def by_leaf(
    ranks: Communicator, verb: str, seconds: float | None, value: Any, fn: Callable[[Any, tuple[str, ...]], Any]
) -> Any:
    """Return a nested value of what ``fn(array, paths)`` makes of each leaf.  Collective as `fn` is."""
    collective = leaf_by_leaf(ranks, verb, seconds, fn)
    return of_leaves(value, lambda leaf: plain(dense_component(leaf, verb)), collective)


def broadcast_value(extended: Any, value: Any, root: int, options: CommunicationOptions | None) -> Any:
    """Return the value of replica `root` of a strategy, leaf by leaf.  Collective."""
    ranks, seconds = extended.collectives, extended.timeout_seconds(options)
    return by_leaf(
        ranks, "broadcast", seconds, value, lambda leaf, paths: ranks.broadcast_copy(leaf, root, seconds, paths)
    )
