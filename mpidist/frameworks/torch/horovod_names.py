"""Horovod's names for collectives of tensors: ``import mpidist.torch as hvd``.

A collective with ``_async`` in its name is carried out at once: on the cores of one machine there is nobody to carry it
out meanwhile.  Results have the dtype of what was given; a mean of integers is cut to one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mpidist import ranks
from mpidist.frameworks.torch import collectives
from mpidist.options import ReduceOp
from mpidist.world import init as init

Average, Sum, Min, Max, Product = ReduceOp.MEAN, ReduceOp.SUM, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT


class TensorHandle:
    """The handle of a collective that was asked for without waiting; it has the result."""

    def __init__(self, result: Any) -> None:
        self.result = result


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = None,
    op: ReduceOp | str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
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
    compression : None
        A single tensor is sent as it is.
    op : ReduceOp or str, optional
    prescale_factor, postscale_factor : float
        What values are multiplied by before they are reduced, and what results are multiplied by.
    """
    if average is not None and op is not None:
        raise ValueError("allreduce takes `average` or `op`, not both")
    if compression is not None:
        raise ValueError(
            f"compression={compression!r}: a single tensor is sent as it is; DistributedOptimizer takes it"
        )
    if average is not None:
        op = Average if average else Sum
    scaled = tensor if prescale_factor == 1.0 else tensor * prescale_factor
    found = collectives.all_reduce(scaled, Average if op is None else op)
    found = found if postscale_factor == 1.0 else found * postscale_factor
    return found if found.dtype is tensor.dtype else found.to(tensor.dtype)


def allreduce_(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Reduce a tensor in place, and return it; parameters as for `allreduce`.  Collective."""
    with torch.no_grad():
        return tensor.copy_(allreduce(tensor, *args, **kwargs))


def grouped_allreduce(tensors: Sequence[torch.Tensor], *args: Any, **kwargs: Any) -> list[torch.Tensor]:
    """Return tensors reduced one after the other; parameters as for `allreduce`.  Collective."""
    return [allreduce(each, *args, **kwargs) for each in tensors]


def grouped_allreduce_(tensors: Sequence[torch.Tensor], *args: Any, **kwargs: Any) -> list[torch.Tensor]:
    """Reduce tensors in place, and return them; parameters as for `allreduce`.  Collective."""
    return [allreduce_(each, *args, **kwargs) for each in tensors]


def allgather(tensor: torch.Tensor, name: str | None = None) -> torch.Tensor:
    """Return the tensors of all ranks joined along their first axis, in which they may differ.  Collective."""
    return collectives.all_gather(tensor)


def broadcast(tensor: torch.Tensor, root_rank: int = 0, name: str | None = None) -> torch.Tensor:
    """Return the tensor of one rank.  Collective: every rank calls it in the same order."""
    return collectives.broadcast(tensor, root_rank)


def broadcast_(tensor: torch.Tensor, root_rank: int = 0, name: str | None = None) -> torch.Tensor:
    """Give all ranks the tensor of one, in place, and return it.  Collective."""
    with torch.no_grad():
        return tensor.copy_(collectives.broadcast(tensor, root_rank))


def alltoall(tensor: torch.Tensor, splits: Any = None, name: str | None = None) -> Any:
    """Return the rows that every rank has sent to this one; with `splits`, also how many each gave.  Collective."""
    wanted = splits.tolist() if isinstance(splits, torch.Tensor) else splits
    found, received = collectives.all_to_all(tensor, wanted)
    return found if splits is None else (found, torch.tensor(received, dtype=torch.int32))


def reducescatter(tensor: torch.Tensor, name: str | None = None, op: ReduceOp | str = Average) -> torch.Tensor:
    """Return this rank's rows of the reduced tensor.  Collective: every rank calls it in the same order."""
    return collectives.reduce_scatter(tensor, op)


def _started(fn: Any) -> Any:
    def start(*args: Any, **kwargs: Any) -> TensorHandle:
        return TensorHandle(fn(*args, **kwargs))

    start.__name__ = start.__qualname__ = f"{fn.__name__}_async"
    start.__doc__ = f"Return a handle, whose result `synchronize` returns, of a `{fn.__name__}`. Collective."
    return start


allreduce_async, allgather_async, broadcast_async = _started(allreduce), _started(allgather), _started(broadcast)
allreduce_async_, broadcast_async_ = _started(allreduce_), _started(broadcast_)
grouped_allreduce_async, alltoall_async = _started(grouped_allreduce), _started(alltoall)
grouped_allreduce_async_, reducescatter_async = _started(grouped_allreduce_), _started(reducescatter)


def synchronize(handle: TensorHandle) -> Any:
    """Return the result of what a handle stands for."""
    if not isinstance(handle, TensorHandle):
        raise TypeError(f"synchronize takes what allreduce_async and its like return, got a {type(handle).__name__}")
    return handle.result


def poll(handle: TensorHandle) -> bool:
    """Return whether the result is there: always.  Local."""
    return True


rank, size, local_rank, local_size, barrier = ranks.rank, ranks.size, ranks.local_rank, ranks.local_size, ranks.barrier
broadcast_object, allgather_object = ranks.broadcast_object, ranks.all_gather_object


def is_initialized() -> bool:
    """Return True: the ranks are there when they are asked for.  Local."""
    return True


def shutdown() -> None:
    """Do nothing: the ranks part when the script ends.  Local."""
