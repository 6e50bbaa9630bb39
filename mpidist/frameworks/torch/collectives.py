"""Collectives of tensors, through which gradients flow.

The gradient is that of the *sum* of all replicas' losses, so backward passes are collective, too: every rank takes the
gradient of the same function in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mpidist.collectives.exchange.plain import checked_rank
from mpidist.compression import BFloat16, Compression, Float16
from mpidist.errors import UnsupportedDtypeError, quoted
from mpidist.frameworks.replicas import Replicas
from mpidist.frameworks.torch import crossing, cuda
from mpidist.frameworks.torch.replicas import replicas_of
from mpidist.frameworks.torch.tensors import array_of, check_memory, flat_of, integers_of, is_known, tensor_of
from mpidist.options import ReduceOp


def all_reduce(
    tensor: torch.Tensor, op: ReduceOp | str = ReduceOp.SUM, compression: Compression | None = None
) -> torch.Tensor:
    """Return a tensor reduced over all replicas.

    Collective: every rank calls it in the same order, and makes its backward passes in the same order.

    Parameters
    ----------
    tensor : tensor
        In host memory or on a CUDA device, of one shape and dtype on all ranks; unchanged.
    op : ReduceOp or str
        SUM, MEAN, MIN, MAX or PRODUCT; gradients flow through the first two.
    compression : Float16 or BFloat16, optional
        How floats of a sum or a mean are coded on the wire, on the way back, too; without error feedback.

    Returns
    -------
    tensor
        A new one, the same bits on all ranks.  Means of integers are float64.

    Raises
    ------
    CollectiveMismatchError
        On all ranks: shapes or dtypes differ, or ranks called something else.
    NotImplementedError
        A tensor on a device that is not CUDA's.
    UnsupportedDtypeError
        A compression, which codes values of the host, for a CUDA tensor.
    ValueError
        Another compression, or one with error feedback.
    """
    if compression is not None and not isinstance(compression, (Float16, BFloat16)):
        raise ValueError(
            f"compression={quoted(compression)}: a single tensor is sent as it is (None), or by Float16() or "
            "BFloat16() of mpidist.compression; DistributedOptimizer takes other stages, which keep what they have not "
            "sent yet"
        )
    if compression is not None and compression.error_feedback:
        raise ValueError(
            f"compression={quoted(compression)}: a single tensor has no next call, to which its error would be added; "
            "leave error_feedback out, or use DistributedOptimizer, which keeps the error of each gradient"
        )
    own = checked(tensor)
    if compression is not None and cuda.has(own):
        raise UnsupportedDtypeError(
            f"compression={quoted(compression)} codes values in host memory, and the tensor lies on {tensor.device}: "
            "pass tensor.cpu(), or no compression"
        )
    total: torch.Tensor = _AllReduce.apply(own, ReduceOp.parse(op).verb, compression, replicas_of())
    return total


def all_gather(tensor: torch.Tensor, axis: int = 0) -> torch.Tensor:
    """Return the tensors of all replicas joined along an axis, in rank order.

    Collective: every rank calls it in the same order, and makes its backward passes in the same order.

    Parameters
    ----------
    tensor : tensor of at least one dimension
        Ranks may differ in the length of `axis`, and in nothing else.
    axis : int
    """
    found: torch.Tensor = _AllGather.apply(checked(tensor), axis, replicas_of())
    return found


def reduce_scatter(tensor: torch.Tensor, op: ReduceOp | str = ReduceOp.SUM) -> torch.Tensor:
    """Return this rank's rows of the reduced tensor: of n rows those from r * n // size to (r + 1) * n // size.

    Collective: every rank calls it in the same order, and makes its backward passes in the same order.  Gradients flow
    through SUM and MEAN.
    """
    found: torch.Tensor = _ReduceScatter.apply(checked(tensor), ReduceOp.parse(op).verb, replicas_of())
    return found


def all_to_all(tensor: torch.Tensor, splits: Sequence[int] | None = None) -> tuple[torch.Tensor, list[int]]:
    """Send rows to every rank; return those that every rank has sent to this one, and how many each gave.

    Collective: every rank calls it in the same order, and makes its backward passes in the same order.

    Parameters
    ----------
    tensor : tensor of at least one dimension
        Its first rows are for rank 0, the next ones for rank 1, and so on.
    splits : sequence of int, optional
        How many rows each rank gets; by default all get as many.
    """
    received: list[int] = []
    found: torch.Tensor = _RowExchange.apply(checked(tensor), splits, received, replicas_of())
    return found, received


def checked(tensor: torch.Tensor) -> torch.Tensor:
    """Return what a collective was given; raise for what is no dense tensor in memory that ranks share."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"expected a tensor, got a {type(tensor).__name__}; mpidist's own collectives take arrays")
    check_memory([("the tensor", tensor)], None)
    if tensor.layout is not torch.strided:
        raise ValueError(f"a {tensor.layout} tensor is not sent to other ranks; make it a dense one first")
    return tensor


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)


def _moved(replicas: Replicas, what: str, tensor: torch.Tensor) -> Any:
    """Return a contiguous tensor as an array that is only moved; of a dtype that NumPy does not have, its bits.

    Collective where it has not: dtypes are compared, which the bits do not tell.
    """
    if is_known(tensor.dtype):
        return array_of(tensor)
    replicas.check(what, [("the tensor", str(tensor.dtype).replace("torch.", ""), ())])
    return array_of(integers_of(tensor.detach()))


def _as_given(array: Any, tensor: torch.Tensor) -> torch.Tensor:
    """Return what was moved as a tensor of the dtype of the one that was given."""
    found = tensor_of(array)
    return found if found.dtype is tensor.dtype else found.view(tensor.dtype)


def _require_adds(op: str) -> None:
    if op not in ("sum", "mean"):
        raise RuntimeError(f"gradients flow through a sum or a mean over replicas, not through {op!r}")


class _AllReduce(torch.autograd.Function):
    """A sum goes back as a sum, a mean as a mean."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, op: str, compression: Compression | None, replicas: Replicas
    ) -> torch.Tensor:
        ctx.op, ctx.compression, ctx.replicas = op, compression, replicas
        is_whole = op == "mean" and not (tensor.is_floating_point() or tensor.is_complex())
        result = tensor.detach().double() if is_whole else _copied(tensor)
        coded = compression if tensor.is_floating_point() and op in ("sum", "mean") else None
        with cuda.in_order_of(result):
            replicas.reduce(op, [array_of(result)], "tensor", coded)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        _require_adds(ctx.op)
        crossing.note()
        return _AllReduce.apply(gradients[0], ctx.op, ctx.compression, ctx.replicas), None, None, None


class _AllGather(torch.autograd.Function):
    """What comes back is added up, and each takes its own part."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, axis: int, replicas: Replicas) -> torch.Tensor:
        ctx.replicas = replicas
        if replicas.size == 1:
            ctx.part = None
            return _copied(tensor)
        with cuda.in_order_of(tensor):
            given = _moved(replicas, "all_gather", flat_of(tensor))
            found = _as_given(replicas.communicator.all_gather(given, axis), tensor)
        ctx.part = axis, replicas.own_part(tensor.shape[axis]).start, tensor.shape[axis]
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        if ctx.part is None:
            return gradients[0], None, None
        crossing.note()
        return _AllReduce.apply(gradients[0], "sum", None, ctx.replicas).narrow(*ctx.part), None, None


class Broadcast(torch.autograd.Function):
    """What comes back is added up for the rank that gave the tensor; it has no part in those of others."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, root: int, replicas: Replicas) -> torch.Tensor:
        root = checked_rank(root, replicas.size, "broadcast: root")
        ctx.is_root, ctx.replicas, result = replicas.rank == root, replicas, _copied(tensor)
        if replicas.size > 1:
            with cuda.in_order_of(result):
                replicas.communicator.broadcast(_moved(replicas, "broadcast", result), root)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        crossing.note()
        total = _AllReduce.apply(gradients[0], "sum", None, ctx.replicas)
        return total if ctx.is_root else torch.zeros_like(total), None, None


class _ReduceScatter(torch.autograd.Function):
    """What comes back is gathered."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, op: str, replicas: Replicas) -> torch.Tensor:
        ctx.op, ctx.replicas = op, replicas
        if replicas.size == 1:
            return _copied(tensor)
        with cuda.in_order_of(tensor):
            return tensor_of(replicas.communicator.reduce_scatter(array_of(flat_of(tensor)), op))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        _require_adds(ctx.op)
        crossing.note()
        found = _AllGather.apply(gradients[0], 0, ctx.replicas)
        return found / ctx.replicas.size if ctx.op == "mean" else found, None, None


class _RowExchange(torch.autograd.Function):
    """What comes back goes the way that it came."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, splits: Sequence[int] | None, received: list[int], replicas: Replicas
    ) -> torch.Tensor:
        ctx.replicas = replicas
        if replicas.size == 1:
            if splits is not None and [int(each) for each in splits] != [len(tensor)]:
                raise ValueError(f"splits {list(splits)} for {len(tensor)} rows and 1 rank")
            received[:] = ctx.received = [len(tensor)]
            return _copied(tensor)
        wanted = None if splits is None else [int(each) for each in splits]
        with cuda.in_order_of(tensor):
            given = _moved(replicas, "all_to_all", flat_of(tensor))
            rows, counts = replicas.communicator.all_to_all(given, wanted)
            received[:] = ctx.received = counts
            return _as_given(rows, tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        crossing.note()
        return _RowExchange.apply(gradients[0], ctx.received, [], ctx.replicas), None, None, None
