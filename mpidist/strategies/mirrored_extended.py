"""`MirroredExtended`: what library code asks of a strategy whose replicas are the ranks of a communicator."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any
from weakref import finalize

import numpy

from mpidist import context
from mpidist.arrays import is_device
from mpidist.collectives.communicator import Communicator
from mpidist.collectives.engine import Engine
from mpidist.collectives.mismatch import MERGE_CALL
from mpidist.collectives.reductions.gradient_buffers import GradientBuffers
from mpidist.cross_device_ops import CrossDeviceOps, names_of, overrides
from mpidist.errors import RemoteReplicaError
from mpidist.input.agreement import Agreement, described
from mpidist.input.distributed import as_dataset, copies_to, distributed
from mpidist.input.options import InputOptions
from mpidist.options import CommunicationOptions, ReduceOp
from mpidist.runtime.trace_kinds import STEP
from mpidist.strategies.extended import StrategyExtended
from mpidist.variables import DistributedVariable, IndexedSlices
from mpidist.variables.row_reduction import gather_rows, reduce_rows


class MirroredExtended(StrategyExtended):
    """Replicas on the ranks of a communicator, one each.

    `options`: those of every call; a call's own are put over them.  `whole`: of all ranks, where `communicator` has a
    part of them.
    """

    def __init__(
        self,
        strategy: Any,
        communicator: Communicator,
        device_name: str,
        worker_devices: tuple[str, ...],
        cross_device_ops: CrossDeviceOps,
        options: CommunicationOptions | None = None,
        whole: Communicator | None = None,
    ) -> None:
        super().__init__(strategy, device_name, communicator if whole is None else whole)
        if not isinstance(cross_device_ops, CrossDeviceOps):
            raise ValueError(f"cross_device_ops must be a CrossDeviceOps, got {cross_device_ops!r}")
        cross_device_ops.bind(communicator, worker_devices)
        self.num_replicas = communicator.size
        self.replica_id = communicator.rank
        self.communicator = communicator
        self._control = communicator.control
        self.cross_device_ops = cross_device_ops
        self._worker_devices = worker_devices
        self._options = CommunicationOptions() if options is None else options
        # The communicator goes on, and keeps what it has bound; but who was given the results is no more.
        finalize(self, communicator.bindings.free_results).atexit = False
        self._call_inside = communicator.observer.function(STEP, context.call_inside)
        cross_device_ops.options = self._options
        # A subclass that overrides `reduce_arrays` wants every gradient to pass through it.
        self._is_plain = not overrides(type(self), MirroredExtended, "reduce_arrays")
        own = overrides(type(cross_device_ops), CrossDeviceOps, "_gather", "_gather_implementation")
        self._gathers_plainly = not own

    def reduce_arrays(
        self,
        reduce_op: ReduceOp,
        values: list[Any],
        options: CommunicationOptions | None = None,
        destinations: Sequence[Any] | None = None,
    ) -> list[Any]:
        """Return arrays reduced over all replicas, in one fused call.  Collective."""
        options = self._options if options is None else self._options.merge(options)
        if IndexedSlices in map(type, values):
            return self._reduce_with_rows(reduce_op, values, options, destinations)
        if not values:
            return self.communicator.all_reduce_list([], reduce_op.verb, timeout_seconds=options.timeout_seconds)
        return self.cross_device_ops.reduce_list(reduce_op, values, destinations, options)

    def engine(self, options: CommunicationOptions | None = None) -> Engine | None:
        """Return what reduces lists of arrays; None where each value passes through methods.  Local."""
        if not self._is_plain:
            return None
        return self.cross_device_ops.engine(self._options if options is None else self._options.merge(options))

    def _make_gradient_buffers(self, variables: Sequence[DistributedVariable]) -> list[Any]:
        communicator = self.communicator
        on_host = not any(is_device(variable.live) for variable in variables)
        if communicator.segments is None or communicator.size == 1 or not on_host or not variables:
            return super()._make_gradient_buffers(variables)
        signatures = [(variable.name, variable.dtype, variable.shape) for variable in variables]
        communicator.check(communicator.call("gradient_buffers", signatures), self._options.timeout_seconds)
        return GradientBuffers(communicator, signatures, self._options.timeout_seconds).hand_out()

    def _reduce_with_rows(
        self, reduce_op: ReduceOp, values: list[Any], options: CommunicationOptions, destinations: Sequence[Any] | None
    ) -> list[Any]:
        """Return arrays and rows reduced over all replicas: the arrays in one fused call, then each set of rows."""
        results = list(values)
        dense = [index for index, value in enumerate(values) if not isinstance(value, IndexedSlices)]
        if dense:
            wanted = None if destinations is None else [destinations[index] for index in dense]
            reduced = self.reduce_arrays(reduce_op, [values[index] for index in dense], options, wanted)
            for index, value in zip(dense, reduced, strict=True):
                results[index] = value
        for index in sorted({*range(len(values))} - {*dense}):
            names = None if destinations is None else names_of([destinations[index]])
            seconds = options.timeout_seconds
            results[index] = reduce_rows(self.communicator, reduce_op, values[index], seconds, names or ())
        return results

    def gather_rows(self, rows: IndexedSlices) -> IndexedSlices:
        """Return the rows of all replicas, one after another in replica order.  Collective."""
        return gather_rows(self.communicator, rows, self._options.timeout_seconds)

    @property
    def collectives(self) -> Communicator:
        """The communicator of the replicas."""
        return self.communicator

    def timeout_seconds(self, options: CommunicationOptions | None) -> float | None:
        """Return how long a call with these options waits for other replicas; None for the default.  Local."""
        return (self._options if options is None else self._options.merge(options)).timeout_seconds

    def begin_merge_call(self) -> None:
        """Return when all replicas have come to this `merge_call`; MergeCallError on all ranks if some have not."""
        self.communicator.barrier(MERGE_CALL, self._options.timeout_seconds)

    def gather_array(
        self, value: Any, axis: int, options: CommunicationOptions | None = None, paths: tuple[str, ...] = ()
    ) -> numpy.ndarray:
        """Return the arrays of all replicas joined along `axis`.  Collective."""
        options = self._options if options is None else self._options.merge(options)
        if self._gathers_plainly and type(value) is numpy.ndarray:
            return self.communicator.all_gather(value, axis, options.timeout_seconds, paths)
        return self.cross_device_ops._gather(value, value, axis, options)

    def broadcast_to(self, tensor: Any, destinations: Any) -> Any:
        """Return replica 0's `tensor` on every rank.  Collective."""
        return self.cross_device_ops.broadcast(tensor, destinations)

    def distribute_dataset(self, dataset: Any, options: InputOptions | None = None) -> Any:
        """Return this replica's parts of the global batches of a data set, which the ranks compare.  Collective."""
        agreement = self._agreement()
        agreement.compare("experimental_distribute_dataset", described(dataset))
        return distributed(
            as_dataset(dataset),
            self.replica_id,
            self.num_replicas,
            agreement,
            self.is_one_worker,
            options,
            copies_to(self.device_name),
        )

    def _agreement(self) -> Agreement:
        return Agreement(self.communicator, self._options.timeout_seconds)

    def share_initial_value(self, variable: DistributedVariable) -> None:
        """Give every copy of a new variable the chief's value.  Collective."""
        self._share_from_chief(variable, self.communicator)

    def _share_from_chief(self, variable: DistributedVariable, communicator: Communicator) -> None:
        # the check goes first: it names the variable, which a broadcast would not
        call = communicator.call("Variable", [(variable.name, variable.dtype, variable.shape)])
        communicator.check(call, self._options.timeout_seconds)
        communicator.broadcast(variable.storage, timeout_seconds=self._options.timeout_seconds)

    def _tell(self, error: BaseException, begun_at: int) -> bool:
        """Let the other ranks raise RemoteReplicaError in their next collective, unless they know of the error."""
        if isinstance(error, SystemExit) or getattr(error, "on_all_ranks", False):
            return False  # when SystemExit is raised the rank leaves, which its exit hook says
        # they know of their own, of one that a run inside this one has told, and of what was made of either in this run
        is_known = isinstance(error, RemoteReplicaError) or any(
            each is self._told or (isinstance(each, RemoteReplicaError) and each.call > begun_at)
            for each in _origins(error)
        )
        if not is_known:
            self.communicator.miss(error)
        return True

    @property
    def worker_devices(self) -> tuple[str, ...]:
        """The devices of the replicas that this strategy knows by name."""
        return self._worker_devices


def _origins(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, what it was made of, and in whose handling it was raised."""
    seen, left = set(), [error]
    while left:
        origin = left.pop()
        if id(origin) not in seen:  # not by ==, which an error may define
            seen.add(id(origin))
            yield origin
            left += [before for before in (origin.__cause__, origin.__context__) if before is not None]
