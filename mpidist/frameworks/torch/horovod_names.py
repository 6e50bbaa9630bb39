"""Horovod's names for collectives of tensors: ``import mpidist.torch as hvd``.

A collective with ``_async`` in its name is carried out at once: on the cores of one machine there is nobody to carry it
out meanwhile.  Results have the dtype of what was given; a mean of integers is cut to one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from mpidist import ranks, world
from mpidist.collectives.handle import Handle
from mpidist.collectives.mismatch import fact
from mpidist.frameworks.torch import collectives
from mpidist.frameworks.torch.comparison import described
from mpidist.frameworks.torch.replicas import replicas_of
from mpidist.options import ReduceOp
from mpidist.transports import World

__all__ = [
    "Average",
    "Max",
    "Min",
    "Product",
    "Sum",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "init",
    "is_initialized",
    "local_rank",
    "local_size",
    "poll",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "shutdown",
    "size",
    "synchronize",
]

Average, Sum, Min, Max, Product = ReduceOp.MEAN, ReduceOp.SUM, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT


def init(comm: Any = None, process_sets: Any = None) -> World:
    """Join the ranks; nobody needs to call it.  As `mpidist.init`, and a list of all ranks is taken, too.

    Collective as for `mpidist.init`.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm, optional
    process_sets : None
        See `allreduce`.
    """
    if process_sets:
        _check_set(process_sets, "process_sets")
    if not isinstance(comm, (list, tuple, range)):
        return world.init(comm)
    if comm and not (len(comm) == ranks.size() and all(each in comm for each in range(ranks.size()))):
        raise ValueError(
            f"init({list(comm)}): a list has the numbers of all {ranks.size()} ranks of the job. For some of them pass "
            "a communicator, init(MPI.COMM_WORLD.Split(color)) with `from mpi4py import MPI`, or start the script with "
            "as many ranks as shall train"
        )
    return world.init()


def _check_set(process_set: Any, name: str = "process_set") -> None:
    """Raise unless all ranks are meant."""
    if process_set is not None:
        raise NotImplementedError(
            f"{name}={process_set!r}: collectives here are those of all ranks of a world. Make a world of some ranks, "
            "world = mpidist.new_world(comm), and call them inside `with world:`; for all ranks leave it out"
        )


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = None,
    op: ReduceOp | str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: None = None,
) -> torch.Tensor:
    """Return a tensor reduced over all replicas: the mean unless another `op` is given.

    Collective: every rank calls it in the same order.  Gradients flow through means and sums.

    Parameters
    ----------
    tensor : tensor
    average : bool, optional
        True for the mean, False for the sum; in place of `op`.
    name : str, optional
        Without effect.
    compression : Compression, optional
        ``Compression.fp16`` or ``Compression.bf16`` has means and sums of floats sent in 16 bits.
    op : ReduceOp or str, optional
    prescale_factor, postscale_factor : float
        What values are multiplied by before they are reduced, and what results are multiplied by.
    process_set : None
        All replicas; some of them are a world of their own, `mpidist.new_world`.
    """
    _check_set(process_set)
    if average is not None and op is not None:
        raise ValueError("allreduce takes `average` or `op`, not both")
    if average is not None:
        op = Average if average else Sum
    found = collectives.all_reduce(_times(tensor, prescale_factor), Average if op is None else op, compression)
    return _times(found, postscale_factor).to(tensor.dtype)


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: None = None,
) -> torch.Tensor:
    """Reduce a tensor in place, and return it; parameters as for `allreduce`.  Collective."""
    with torch.no_grad():
        return tensor.copy_(allreduce(tensor, average, name, None, op, prescale_factor, postscale_factor, process_set))


def grouped_allreduce(tensors: Sequence[torch.Tensor], *args: Any, **kwargs: Any) -> list[torch.Tensor]:
    """Return tensors reduced one after the other; parameters as for `allreduce`.  Collective."""
    return [allreduce(each, *args, **kwargs) for each in _counted(tensors)]


def grouped_allreduce_(tensors: Sequence[torch.Tensor], *args: Any, **kwargs: Any) -> list[torch.Tensor]:
    """Reduce tensors in place, and return them; parameters as for `allreduce_`.  Collective."""
    return [allreduce_(each, *args, **kwargs) for each in _counted(tensors)]


def _counted(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return a list; raise unless all ranks have as many, or one's next call would be taken for a tensor of it."""
    found = list(tensors)
    replicas_of().check("grouped_allreduce", [fact("tensors", len(found))])
    return found


def allgather(tensor: torch.Tensor, name: str | None = None, process_set: None = None) -> torch.Tensor:
    """Return the tensors of all ranks joined along their first axis, in which they may differ.  Collective."""
    _check_set(process_set)
    return collectives.all_gather(tensor)


def broadcast(
    tensor: torch.Tensor, root_rank: int = 0, name: str | None = None, process_set: None = None
) -> torch.Tensor:
    """Return the tensor of one rank; all give tensors of the same shape and dtype.

    Collective: every rank calls it in the same order, and makes its backward passes in the same order.
    """
    _check_set(process_set)
    found: torch.Tensor = collectives.Broadcast.apply(collectives.checked(tensor), root_rank, replicas_of())
    return found


def broadcast_(
    tensor: torch.Tensor, root_rank: int = 0, name: str | None = None, process_set: None = None
) -> torch.Tensor:
    """Give all ranks the tensor of one, in place, and return it.  Collective."""
    _check_set(process_set)
    with torch.no_grad():
        return tensor.copy_(broadcast(tensor, root_rank))


def alltoall(tensor: torch.Tensor, splits: Any = None, name: str | None = None, process_set: None = None) -> Any:
    """Return the rows that every rank has sent to this one; with `splits`, also how many each gave.  Collective."""
    _check_set(process_set)
    wanted = splits.tolist() if isinstance(splits, torch.Tensor) else splits
    found, received = collectives.all_to_all(tensor, wanted)
    return found if splits is None else (found, torch.tensor(received, dtype=torch.int32))


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: None = None,
    op: ReduceOp | str = Average,
    process_set: None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Return this rank's rows of the reduced tensor; of n rows the first n % size ranks have one more than the others.

    Parameters as for `allreduce`; values are sent as they are.

    Collective: every rank calls it in the same order.
    """
    _check_set(process_set)
    if compression is not None:
        raise ValueError(f"compression={compression!r}: reducescatter sends values as they are; leave it out")
    found = _scattered(_times(tensor, prescale_factor), op)
    return _times(found, postscale_factor).to(tensor.dtype)


def _scattered(tensor: torch.Tensor, op: ReduceOp | str) -> torch.Tensor:
    """Return this rank's rows of the reduced tensor; of rows that are left over the first ranks have one more each."""
    replicas = replicas_of()
    rest = len(tensor) % replicas.size if collectives.checked(tensor).dim() else 0
    if not rest:
        return collectives.reduce_scatter(tensor, op)
    # other numbers of rows may be alike with those that are dropped again
    replicas.check("reducescatter", [described("the tensor", tensor)])
    longer, row = len(tensor) // replicas.size + 1, tensor.shape[1:]
    shorter = tensor[rest * longer :].reshape(replicas.size - rest, longer - 1, *row)
    filled = torch.cat([shorter, shorter.new_zeros(replicas.size - rest, 1, *row)], 1).flatten(0, 1)
    found = collectives.reduce_scatter(torch.cat([tensor[: rest * longer], filled]), op)
    return found if replicas.rank < rest else found[:-1]


def _times(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    """Return a tensor times a factor; of whole numbers in 64 bits, since PyTorch's default would cut their digits."""
    if factor == 1.0:
        return tensor
    return (tensor if tensor.is_floating_point() or tensor.is_complex() else tensor.double()) * factor


def _uncoded(fn: Any, place: int) -> Any:
    """Return a collective as Horovod's names in ``_async`` have it: without `compression`, which is at this place."""

    def uncoded(*args: Any, **kwargs: Any) -> Any:
        if "compression" in kwargs:
            raise TypeError(f"{fn.__name__}_async() got an unexpected keyword argument 'compression': it has none")
        if len(args) > place:
            return fn(*args[:place], None, *args[place:], **kwargs)
        return fn(*args, compression=None, **kwargs)

    uncoded.__name__ = fn.__name__
    return uncoded


def _started(fn: Any) -> Any:
    def start(*args: Any, **kwargs: Any) -> Handle:
        result = fn(*args, **kwargs)
        return Handle.done(result)

    start.__name__ = start.__qualname__ = f"{fn.__name__}_async"
    start.__doc__ = f"Return a handle, whose result `synchronize` returns, of a `{fn.__name__}`. Collective."
    return start


allreduce_async = _started(_uncoded(allreduce, 3))
grouped_allreduce_async = _started(_uncoded(grouped_allreduce, 3))
allgather_async, broadcast_async, alltoall_async = _started(allgather), _started(broadcast), _started(alltoall)
allreduce_async_, broadcast_async_ = _started(allreduce_), _started(broadcast_)
grouped_allreduce_async_, reducescatter_async = _started(grouped_allreduce_), _started(_uncoded(reducescatter, 2))


def synchronize(handle: Handle) -> Any:
    """Return the result of what a handle stands for."""
    if not isinstance(handle, Handle):
        raise TypeError(f"synchronize takes what allreduce_async and its like return, got a {type(handle).__name__}")
    return handle.wait()


def poll(handle: Handle) -> bool:
    """Return True: a sum is made by `synchronize`, so who polls before that must not be kept waiting.  Local."""
    return True


rank, size, local_rank, local_size = ranks.rank, ranks.size, ranks.local_rank, ranks.local_size


def barrier(process_set: None = None, *, timeout_seconds: float | None = None) -> None:
    """Return when all ranks have come here; see `mpidist.barrier`.

    Collective: every rank calls it in the same order.
    """
    _check_set(process_set)
    ranks.barrier(timeout_seconds)


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    name: str | None = None,
    process_set: None = None,
    *,
    timeout_seconds: float | None = None,
) -> Any:
    """Return the object of one rank on all ranks; see `mpidist.broadcast_object`.

    Collective: every rank calls it in the same order, with the same `root_rank`.
    """
    _check_set(process_set)
    return ranks.broadcast_object(obj, root_rank, timeout_seconds=timeout_seconds)


def allgather_object(
    obj: Any, name: str | None = None, process_set: None = None, *, timeout_seconds: float | None = None
) -> list[Any]:
    """Return the objects of all ranks, in rank order; see `mpidist.all_gather_object`.

    Collective: every rank calls it in the same order.
    """
    _check_set(process_set)
    return ranks.all_gather_object(obj, timeout_seconds=timeout_seconds)


def is_initialized() -> bool:
    """Return True: the ranks are there when they are asked for.  Local."""
    return True


def shutdown() -> None:
    """Do nothing: the ranks part when the script ends.  Local."""
