"""`BoundCollectives`: collectives over replicas that are bound to the shapes and dtypes of a value, for tight loops."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mpidist.arrays import plain
from mpidist.collectives.persistent_all_reduce import BoundAllReduce, OwnWay, PersistentAllReduce
from mpidist.collectives.persistent_collective import PersistentCollective
from mpidist.collectives.reductions.adjustment import Adjustment, adjusted
from mpidist.collectives.structures import Paths
from mpidist.cross_device_ops import value_names
from mpidist.options import CommunicationOptions, ReduceOp
from mpidist.variables import IndexedSlices
from mpidist.variables.components import component, dense_component


class BoundCollectives:
    """Collectives over the replicas of a strategy that are bound once, then called, or started and waited for.

    A replica context has them for the code inside `Strategy.run`, a strategy for the code outside.
    """

    def _here(self) -> Any:
        """Return the `extended` of the strategy; RuntimeError in another context than this object's."""
        raise NotImplementedError(type(self).__name__)

    def all_reduce_init(
        self,
        reduce_op: ReduceOp | str,
        like: Any,
        options: CommunicationOptions | None = None,
        *,
        prescale: float | None = None,
        postscale: float | None = None,
        none_as_zeros: bool = False,
    ) -> PersistentAllReduce:
        """Bind an all-reduce to the shapes and dtypes of a value, for tight loops.

        What a call finds out each time is settled once.  The result is called with values, or started and
        waited for.  Where the strategy reduces in a way of its own (a `CrossDeviceOps` or an `extended` of the user's),
        every value goes that way.

        Collective: every replica calls it in the same order, with the same structure, shapes and dtypes.

        Parameters
        ----------
        reduce_op : ReduceOp or str
            SUM, MEAN, MIN, MAX or PRODUCT, also by name in any case.
        like : array, or nested tuples, lists and dicts of arrays
            No reference to it is kept.
        options : CommunicationOptions, optional
            Fields that are set win over the strategy's.
        prescale, postscale : float, optional
            What values are multiplied by before they are reduced, and what results are multiplied by.
        none_as_zeros : bool
            Whether an array may be None in a call: it counts as zeros then, in a sum or a mean.  One that is None on
            all replicas is None in the result.

        Raises
        ------
        RuntimeError
            In another context than that of this object.
        TypeError
            An IndexedSlices: its rows differ from step to step.
        ValueError
            A factor that is 0 or not finite; `none_as_zeros` with another operation than SUM and MEAN.
        UnsupportedDtypeError
            A factor for arrays of whole numbers, or an operation that the dtype does not have.
        """
        extended, reduce_op = self._here(), ReduceOp.parse(reduce_op)
        adjustment = Adjustment(prescale, postscale, none_as_zeros)
        engine, op = extended.engine(options), reduce_op.verb

        def bind(examples: list[Any], paths: Paths) -> BoundAllReduce:
            if engine is None:
                return OwnWay(adjusted(reduce, examples, op, adjustment, paths))
            return engine.bind(examples, op, adjustment=adjustment, names=paths)

        def reduce(arrays: list[Any], paths: Paths) -> list[Any]:
            return extended.reduce_arrays(reduce_op, arrays, options, value_names(paths))

        return PersistentAllReduce(bind, like, _array_of, none_as_zeros)

    def broadcast_init(
        self, like: Any, root: int = 0, options: CommunicationOptions | None = None
    ) -> PersistentCollective:
        """Return the `broadcast` of values like this one.  Local."""
        return self._bound("broadcast", (root,), like, options)

    def all_gather_init(
        self, like: Any, axis: int, options: CommunicationOptions | None = None
    ) -> PersistentCollective:
        """Return the `all_gather` of values like this one, of any length of `axis`.  Local.

        Text has one width on all replicas.
        """
        return self._bound("all_gather", (axis,), like, options)

    def reduce_scatter_init(
        self, reduce_op: ReduceOp | str, like: Any, options: CommunicationOptions | None = None
    ) -> PersistentCollective:
        """Return the `reduce_scatter` of values like this one.  Local."""
        return self._bound("reduce_scatter", (ReduceOp.parse(reduce_op).verb,), like, options)

    def all_to_all_init(
        self, like: Any, splits: Sequence[int] | None = None, options: CommunicationOptions | None = None
    ) -> Any:
        """Return the `all_to_all` of arrays like this one, of any number of rows.  Local.

        It is called, or started, with an array, or with an array and its splits as a tuple.

        Parameters
        ----------
        like : array of at least one dimension
        splits : sequence of int, optional
            How many rows each replica gets in calls that give none; by default all get as many.
        options : CommunicationOptions, optional

        Raises
        ------
        ValueError
            Splits that are negative, too many or too few.
        """
        extended = self._here()
        bound = extended.collectives.all_to_all_init(dense_component(like, "all_to_all"), splits)
        bound.timeout_seconds = extended.timeout_seconds(options)
        return bound

    def _bound(
        self, verb: str, arguments: tuple[Any, ...], like: Any, options: CommunicationOptions | None
    ) -> PersistentCollective:
        extended = self._here()
        seconds = extended.timeout_seconds(options)

        def array_of(leaf: Any) -> Any:
            return plain(dense_component(leaf, verb))

        return PersistentCollective(extended.collectives, verb, arguments, like, array_of, seconds)


def _array_of(leaf: Any) -> Any:
    if isinstance(leaf, IndexedSlices):
        raise TypeError("bound collectives take arrays, got an IndexedSlices: its rows differ from step to step")
    return plain(component(leaf))
