"""`all_reduce_init`: a compressed all-reduce over the replicas of the strategy in force."""

from __future__ import annotations

from typing import Any

from mpidist import context, nest, transports
from mpidist.arrays import to_array
from mpidist.collectives.communicator import Communicator
from mpidist.collectives.handle import Handle
from mpidist.compression.base import Compression
from mpidist.compression.compressed import CompressedAllReduce
from mpidist.options import ReduceOp


class CompressedReplicaAllReduce:
    """A compressed all-reduce over replicas, for values of one structure; `all_reduce_init` makes it.

    Attributes
    ----------
    bound : CompressedAllReduce
        With `state_dict` and `load_state_dict` for checkpoints.
    """

    def __init__(self, bound: CompressedAllReduce, like: Any) -> None:
        self.bound = bound
        self._structure = nest.numbered(like)

    def __call__(self, value: Any) -> Any:
        """Reduce a value like the one that this was made for; results as of ``all_reduce``.

        Collective: every replica calls it in the same order.

        Raises
        ------
        ValueError
            The structure, a shape or a dtype is another one; before any communication.
        CollectiveMismatchError
            On all replicas: they differ in shapes, dtypes or in the stage.
        """
        return self.start(value).wait()

    def start(self, value: Any) -> Handle:
        """Start the reduction; its handle's ``wait()`` returns the result.  Parameters and errors as for a call.

        Collective: every replica starts, or calls, its collectives in the same order.
        """
        leaves = nest.flatten(value)
        found = nest.numbered(value)
        if found != self._structure:
            raise ValueError(f"this all-reduce was bound to {self._structure}, got {found} (numbers stand for arrays)")
        started = self.bound.start([to_array(leaf) for leaf in leaves])
        return started.then(lambda results: nest.pack(self._structure, results))


def all_reduce_init(reduce_op: ReduceOp | str, like: Any, compression: Compression) -> CompressedReplicaAllReduce:
    """Bind an all-reduce over the replicas of the strategy in force whose floats are coded on the wire.

    Collective: every replica calls it in the same order, inside `Strategy.run`.

    Parameters
    ----------
    reduce_op : ReduceOp or str
        SUM or MEAN, also by name in any case.
    like : array, or nested tuples, lists and dicts of arrays
        Host arrays; no reference to them is kept.
    compression : Compression
        A stage with the same settings on all replicas.

    Returns
    -------
    CompressedReplicaAllReduce
        To be called, or started and waited for, with values like this one.

    Raises
    ------
    RuntimeError
        Outside of a replica.
    NotImplementedError
        The strategy has replicas, and not one a rank: its gradients go to servers, or a replica is a group of ranks.
    UnsupportedDtypeError
        Arrays in device memory.
    """
    if context.in_cross_replica_context():
        raise RuntimeError("mpidist.compression.all_reduce_init is for replicas: call it inside `strategy.run`")
    extended = context.get_strategy().extended
    communicator = getattr(extended, "communicator", None)
    if extended.num_replicas == 1 and extended.num_logical_devices == 1:
        communicator = Communicator(transports.alone())
    elif communicator is None or extended.num_logical_devices > 1:
        raise NotImplementedError(
            f"{type(context.get_strategy()).__name__} does not reduce over one replica a rank, so nothing is "
            "compressed there; use MultiWorkerMirroredStrategy, or all_reduce_init of the replica context"
        )
    leaves, paths = nest.with_paths(like)
    examples, op = [*map(to_array, leaves)], ReduceOp.of_gradients(reduce_op).verb
    return CompressedReplicaAllReduce(CompressedAllReduce(communicator, examples, op, compression, paths), like)
