"""What `Strategy.distribute` does with models and optimizers of PyTorch, and the loss that their gradients are of."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any
from weakref import ref

import numpy
import torch

from mpidist.frameworks.replicas import Replicas
from mpidist.frameworks.torch.data_parallel import DistributedDataParallel, broadcast_buffers, broadcast_module
from mpidist.frameworks.torch.optimizer import DistributedOptimizer
from mpidist.frameworks.torch.replicas import replicas_of
from mpidist.frameworks.torch.row_norms import refuse_row_norms
from mpidist.training.losses import shape_of_weights


def distribute(strategy: Any, objects: Sequence[Any], **options: Any) -> list[Any]:
    """Return models and optimizers that train over the replicas of a strategy.

    With TensorFlow's meaning: gradients are *summed*, so losses are divided by the rows of the global batch
    (`compute_average_loss`).  A model that comes with an optimizer is the same module, with rank 0's parameters and
    buffers.  A model by itself is made a `DistributedDataParallel`, for whatever optimizer it gets.

    Collective: every rank calls it in the same order.

    Parameters
    ----------
    strategy : Strategy
    objects : sequence of torch.nn.Module or torch.optim.Optimizer
    **options
        Of `DistributedOptimizer`, or of `DistributedDataParallel` where there is no optimizer.  ``op="mean"`` averages.

    Raises
    ------
    TypeError
        An object of PyTorch that is neither a module nor an optimizer.
    """
    for obj in objects:
        if not isinstance(obj, (torch.nn.Module, torch.optim.Optimizer)):
            raise TypeError(f"distribute() takes modules and optimizers of PyTorch, got a {type(obj).__name__}")
    options = {"op": "sum", "strategy": strategy, **options}
    modules = [each for each in objects if isinstance(each, torch.nn.Module)]
    if len(modules) == len(objects):
        return [DistributedDataParallel(each, **options) for each in modules]
    replicas, distributed = replicas_of(strategy), []
    for obj in objects:
        if isinstance(obj, torch.nn.Module):
            broadcast_module(replicas, obj)
            refuse_row_norms(replicas, obj)
            if any(True for _ in obj.buffers()):
                obj.register_forward_pre_hook(_BufferSharing(replicas, obj))
            distributed.append(obj)
        else:
            made = DistributedOptimizer(obj, _names_of(modules, obj), **options)
            made._reduction.look_after(modules)
            distributed.append(made)
    return distributed


def compute_average_loss(
    per_example_loss: torch.Tensor,
    sample_weight: torch.Tensor | None = None,
    global_batch_size: int | None = None,
) -> torch.Tensor:
    """Return this replica's part of the mean loss over the global batch; sums over the replicas are the mean.

    Collective without `global_batch_size`: every rank calls it in the same order.

    Parameters
    ----------
    per_example_loss : tensor, shape (rows, ...)
        As of a loss function with ``reduction="none"``; there may be no rows.
    sample_weight : tensor, optional
        What each loss is multiplied by.  With fewer dimensions than the losses it is one weight for each row.
    global_batch_size : int, optional
        By default the rows of all replicas.

    Returns
    -------
    tensor, no dimensions
        Its gradient is this replica's part of that of the global batch.

    Raises
    ------
    ValueError
        A scalar loss, a global batch of no rows, or weights that do not fit the losses.
    """
    if per_example_loss.dim() == 0:
        raise ValueError("compute_average_loss takes a loss for each example: a loss function with reduction='none'")
    if global_batch_size is None:
        rows = numpy.array([len(per_example_loss)], numpy.int64)
        replicas_of().reduce("sum", [rows], "global_batch_size")
        global_batch_size = int(rows[0])
    if global_batch_size < 1:
        raise ValueError(f"global_batch_size={global_batch_size}: it is 1 or more")
    weighted = per_example_loss
    if sample_weight is not None:
        weights = torch.as_tensor(sample_weight, device=weighted.device)
        weighted = weighted * weights.reshape(shape_of_weights(weights.shape, weighted.shape))
    return weighted.sum() / global_batch_size


def _names_of(modules: Sequence[torch.nn.Module], optimizer: torch.optim.Optimizer) -> list[tuple[str, Any]] | None:
    """Return the names that the modules have for an optimizer's parameters, None where they do not have all."""
    several = len(modules) > 1
    named = [
        (f"{number}.{name}" if several else name, each)
        for number, module in enumerate(modules)
        for name, each in module.named_parameters()
    ]
    known = {id(each) for _, each in named}
    wanted = {id(each) for group in optimizer.param_groups for each in group["params"]}
    return [(name, each) for name, each in named if id(each) in wanted] if wanted <= known else None


class _BufferSharing:
    """Has every forward pass in training of one module begin with rank 0's buffers; copies of it are plain modules."""

    def __init__(self, replicas: Replicas, module: torch.nn.Module) -> None:
        self._replicas, self._module = replicas, ref(module)

    def __call__(self, module: torch.nn.Module, args: Any) -> None:
        is_own = self._module() is module
        if is_own and module.training and torch.is_grad_enabled():
            broadcast_buffers(self._replicas, module)

    def __reduce__(self) -> tuple[Any, ...]:
        return partial, (_share_nothing,)


def _share_nothing(module: torch.nn.Module, args: Any) -> None:
    """Stand in a copied or pickled module in place of its `_BufferSharing`."""
