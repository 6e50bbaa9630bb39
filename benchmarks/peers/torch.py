"""PyTorch's Gloo as a peer: one flat tensor, tensor by tensor, and the bucketed reducer of DistributedDataParallel."""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from typing import Any

import numpy

from benchmarks.suite.contender import Contender
from benchmarks.suite.ranks import Ranks, imported
from benchmarks.suite.tensors import TensorList


def started(ranks: Ranks, backend: str = "gloo") -> Any:
    """Return ``torch`` with a process group of all ranks, which is made once.  Collective."""
    torch = imported("torch.distributed", "needs PyTorch: pip install torch", ranks)
    if not torch.distributed.is_initialized():
        _join(torch, ranks, backend)
    return torch


def _join(torch: Any, ranks: Ranks, backend: str) -> None:
    """Make the process group; rank 0 listens for the others."""
    one_node = ranks.node_count == 1
    if one_node:  # a host name that leads nowhere would keep Gloo from connecting
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    host = "127.0.0.1" if one_node else socket.gethostname()
    store = None
    if ranks.rank == 0:
        store = torch.distributed.TCPStore(host, 0, ranks.size, is_master=True, wait_for_workers=False)
    host, port = ranks.comm.bcast((host, store.port) if store is not None else None)
    if store is None:
        store = torch.distributed.TCPStore(host, port, ranks.size, is_master=False)
    limit = {"timeout": timedelta(seconds=60)} if backend == "nccl" else {}  # not ten minutes
    torch.distributed.init_process_group(backend, store=store, rank=ranks.rank, world_size=ranks.size, **limit)


class GlooFlat(Contender):
    """One ``all_reduce`` of one flat tensor, in place; that gradients get there and back is not counted."""

    name = "Gloo flat"

    def __init__(self, ranks: Ranks, tensors: TensorList) -> None:
        super().__init__(ranks, tensors)
        self._torch = started(ranks)

    def prepare(self, gradients: list[Any]) -> Any:
        return self._torch.from_numpy(numpy.concatenate(gradients, axis=None))

    def run(self, prepared: Any) -> Any:
        self._torch.distributed.all_reduce(prepared)
        return prepared

    def arrays(self, result: Any) -> list[Any]:
        return self.tensors.cut(result.numpy())


class GlooEach(Contender):
    """One ``all_reduce`` for each tensor, in place, one after the other: starting all at once proved slower."""

    name = "Gloo each"
    needed_warm_ups = 1

    def __init__(self, ranks: Ranks, tensors: TensorList) -> None:
        super().__init__(ranks, tensors)
        self._torch = started(ranks)

    def prepare(self, gradients: list[Any]) -> Any:
        return [self._torch.from_numpy(gradient) for gradient in gradients]

    def run(self, prepared: Any) -> Any:
        all_reduce = self._torch.distributed.all_reduce
        for tensor in prepared:
            all_reduce(tensor)
        return prepared

    def arrays(self, result: Any) -> list[Any]:
        return [tensor.numpy() for tensor in result]


class GlooReducer(Contender):
    """``DistributedDataParallel``: a backward pass that has its gradients already, and so does nothing but reduce.

    Gradients are views of the buckets, the quickest of its settings.  It averages; ours sums.
    """

    name = "Gloo DDP"

    def __init__(self, ranks: Ranks, tensors: TensorList) -> None:
        super().__init__(ranks, tensors)
        torch = started(ranks)
        if not tensors.dtype.kind == "f":
            raise TypeError(f"gradients are floating, got {tensors.dtype}")
        self._torch = torch
        self._dtype = torch.from_numpy(numpy.empty(0, tensors.dtype)).dtype
        self._module = torch.nn.parallel.DistributedDataParallel(
            module_of(torch, tensors.shapes, self._dtype), init_sync=False, gradient_as_bucket_view=True
        )

    def prepare(self, gradients: list[Any]) -> Any:
        self._module.zero_grad(set_to_none=True)
        return [self._torch.from_numpy(gradient) for gradient in gradients]

    def run(self, prepared: Any) -> Any:
        self._module(prepared).backward()
        return [parameter.grad for parameter in self._module.parameters()]

    def arrays(self, result: Any) -> list[Any]:
        return [numpy.rint(tensor.numpy() * self.ranks.size) for tensor in result]

    def close(self) -> None:
        del self._module


def module_of(torch: Any, shapes: list[Any], dtype: Any) -> Any:
    """Return a module with such parameters, whose backward pass gives them the gradients passed to it."""
    source = _given_gradients(torch)

    class Given(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            parameters = [torch.nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes]
            self.all = torch.nn.ParameterList(parameters)

        def forward(self, gradients: Any) -> Any:
            return source.apply(gradients, *self.all)

    return Given()


def _given_gradients(torch: Any) -> Any:
    """Return an autograd function of all parameters whose gradients are those given to it."""

    class Source(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, gradients: Any, *parameters: Any) -> Any:
            ctx.gradients = gradients
            return gradients[0].new_zeros(())

        @staticmethod
        def backward(ctx: Any, unused: Any) -> Any:
            return (None, *ctx.gradients)

    return Source
