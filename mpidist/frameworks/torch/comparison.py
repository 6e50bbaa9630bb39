"""Comparison of tensors between replicas: errors on all of them that name what differs."""

from __future__ import annotations

from collections.abc import Sequence
from zlib import crc32

import numpy
import torch

from mpidist.errors import CollectiveMismatchError
from mpidist.frameworks.torch.replicas import TorchReplicas
from mpidist.frameworks.torch.tensors import Named, bytes_of


def check_alike(replicas: TorchReplicas, what: str, named: Sequence[Named]) -> None:
    """Raise CollectiveMismatchError on all ranks unless all have such tensors; the first that differs is named.

    Collective: every rank calls it in the same order.
    """
    replicas.check(what, [_described(name, tensor) for name, tensor in named])
    if shapeless := [name for name, tensor in named if _is_shapeless(tensor)]:
        raise ValueError(
            f"{', '.join(map(repr, shapeless[:8]))}: no shape yet; make one forward pass first, from which lazy "
            "modules take it"
        )


def check_equal(replicas: TorchReplicas, what: str, named: Sequence[Named]) -> None:
    """Raise CollectiveMismatchError on all ranks unless all have the same values in new parameters; names one.

    Collective: every rank calls it in the same order.
    """
    check_alike(replicas, f"{what}: new parameters", named)
    if replicas.size == 1:
        return
    found = replicas.exchange(
        numpy.array([crc32(bytes_of(each.cpu())) for _, each in named], numpy.uint32).tobytes(), what
    )
    sums = [numpy.frombuffer(each, numpy.uint32) for each in found]
    for number, (name, _) in enumerate(named):
        if others := [rank for rank, each in enumerate(sums) if each[number] != sums[0][number]]:
            raise CollectiveMismatchError(
                f"{what}: the new parameter {name!r} has other values on rank {_shown(others)} than on rank 0. Give "
                "all ranks those of one (broadcast_parameters) when it is made; add_param_group of a "
                "DistributedOptimizer does"
            )


def _shown(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")


def _described(name: str, tensor: torch.Tensor) -> tuple[str, str, tuple[int, ...]]:
    """Return a tensor as a call describes it."""
    layout = "" if tensor.layout is torch.strided else f" {tensor.layout}"
    dtype = f"{tensor.dtype}{layout}".replace("torch.", "")
    return (name, f"lazy {dtype}", ()) if _is_shapeless(tensor) else (name, dtype, tuple(tensor.shape))


def _is_shapeless(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, torch.nn.parameter.UninitializedTensorMixin)
