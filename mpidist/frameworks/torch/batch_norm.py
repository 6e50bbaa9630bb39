"""`SyncBatchNorm`: batch normalization whose statistics are those of the global batch."""

from __future__ import annotations

from typing import Any

import numpy
import torch
from torch.nn.modules.batchnorm import _BatchNorm, _LazyNormBase

from mpidist.frameworks.replicas import Replicas
from mpidist.frameworks.torch import crossing, cuda
from mpidist.frameworks.torch.replicas import replicas_of
from mpidist.frameworks.torch.tensors import array_of


class SyncBatchNorm(_BatchNorm):
    """Batch normalization over the rows of all replicas, which may have different numbers of them, or none.

    Arguments and attributes are those of `torch.nn.SyncBatchNorm`, without process group.  The running statistics are
    the same on all replicas.  Gradients are those of the *sum* of all replicas' losses with respect to the inputs, as
    PyTorch has it.  So the mean over replicas is right where all have as many rows, and the sum where each loss is
    divided by the rows of the global batch (`compute_average_loss`).

    A forward and a backward pass in training mode are collective: every rank makes them in the same order.  In
    evaluation mode they are local; without running statistics they take those of this rank's rows, as PyTorch's do.
    Over several replicas training mode has no second derivatives: ``create_graph=True`` is a RuntimeError on all ranks.
    """

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the normalized input."""
        self._check_input_dim(input)
        if input.shape[1] == 0:
            raise ValueError(f"SyncBatchNorm: the input has no channels (got shape {tuple(input.shape)})")
        replicas = replicas_of()
        statistics = _Statistics(input, replicas) if self.training and replicas.size > 1 else None
        if statistics is None or statistics.count == 0:  # without rows anywhere, as PyTorch has it
            if self.training and self.track_running_stats and self.num_batches_tracked is not None:
                self.num_batches_tracked.add_(1)
            return self._plain(input)
        if self.track_running_stats:
            self._track(statistics)
        found: torch.Tensor = _Normalize.apply(input, self.weight, self.bias, self.eps, statistics, replicas)
        return found

    def _plain(self, input: torch.Tensor) -> torch.Tensor:
        has_none = self.running_mean is None and self.running_var is None
        tracks = not self.training or self.track_running_stats
        return torch.nn.functional.batch_norm(
            input,
            self.running_mean if tracks else None,
            self.running_var if tracks else None,
            self.weight,
            self.bias,
            self.training or has_none,
            self._factor(),
            self.eps,
        )

    def _factor(self) -> float:
        """Return how much the statistics of a batch weigh in the running ones."""
        if self.momentum is not None:
            return float(self.momentum)
        if self.num_batches_tracked is None:  # there are none
            return 0.0
        return 1.0 / max(1.0, float(cuda.awaited(self.num_batches_tracked)))

    def _track(self, statistics: _Statistics) -> None:
        """Move the running statistics."""
        assert self.running_mean is not None and self.running_var is not None
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        count, factor = statistics.count, self._factor()
        with torch.no_grad():
            self.running_mean.lerp_(statistics.mean.to(self.running_mean.dtype), factor)
            self.running_var.lerp_((statistics.variance * (count / (count - 1))).to(self.running_var.dtype), factor)

    @classmethod
    def convert_sync_batchnorm(cls, module: torch.nn.Module) -> torch.nn.Module:
        """Make every batch normalization of a module one of these, in place, and return the module.  Local.

        The layers stay the objects that they are, with their parameters and hooks, wherever they stand.

        Raises
        ------
        TypeError
            A layer of another class than PyTorch's own, which may compute something else: nothing is converted.
        ValueError
            A lazy layer, which does not know its channels yet.
        """
        found = {name: each for name, each in module.named_modules() if not isinstance(each, cls)}
        layers = [each for name, each in found.items() if _is_convertible(name, each)]
        for each in layers:
            each.__class__ = cls
        return module


#: What is converted: these very classes compute what `SyncBatchNorm` does, and keep it under the same names.
_CONVERTED = (torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d, torch.nn.SyncBatchNorm)


def _is_convertible(name: str, module: torch.nn.Module) -> bool:
    """Return whether a module is converted; TypeError, ValueError for a batch normalization that cannot be."""
    kind = getattr(module, "original_name", type(module).__name__)  # of what TorchScript has compiled
    is_script = isinstance(module, torch.jit.ScriptModule) and "BatchNorm" in str(kind)
    if not (is_script or isinstance(module, _BatchNorm)):
        return False
    what = f"convert_sync_batchnorm: {f'{name!r}, a {kind},' if name else f'a {kind}'}"
    if isinstance(module, _LazyNormBase):
        raise ValueError(f"{what} does not know its channels yet; make one forward pass first, and convert then")
    if type(module) not in _CONVERTED or "forward" in vars(module):
        raise TypeError(
            f"{what} has a class or a forward() of its own, which may compute something else than batch normalization. "
            "Put a mpidist.torch.SyncBatchNorm in its place, or have its class inherit from that; convert before "
            "layers are compiled or parametrized"
        )
    return True


class _Statistics:
    """Count, mean and variance of each channel over all replicas; the mean first, so that nothing cancels."""

    def __init__(self, x: torch.Tensor, replicas: Replicas) -> None:
        self.axes = [0, *range(2, x.dim())]
        self.shape = [1, -1, *[1] * (x.dim() - 2)]
        values = x.detach()
        sums, self.count = _sums(
            replicas, values.sum(self.axes, dtype=torch.float64), values.numel() // values.shape[1]
        )
        if self.count == 0:
            return
        if self.count == 1:
            raise ValueError(
                f"Expected more than 1 value per channel when training, got 1 over {replicas.size} replicas"
            )
        self.mean = sums / self.count
        dtype = _wide(x)
        from_mean = values.to(dtype) - self.mean.to(dtype).view(self.shape)
        rest = (self.mean - self.mean.to(dtype)).view(self.shape)  # of the mean, what the dtype cannot hold
        self.variance = _sums(replicas, (from_mean.double() - rest).square().sum(self.axes))[0] / self.count


def _wide(x: torch.Tensor) -> torch.dtype:
    """Return the dtype in which values are computed."""
    return torch.float64 if x.dtype is torch.float64 else torch.float32


def _sums(replicas: Replicas, values: torch.Tensor, rows: int | None = None) -> tuple[torch.Tensor, int]:
    """Return sums over all replicas, and those of the rows.  Collective.

    On the host both go together.  On a device the rows go by themselves: who knows them need not wait for the device.
    """
    if not cuda.has(values):
        packed = numpy.append(values.cpu().numpy(), rows or 0)
        replicas.reduce("sum", [packed], "SyncBatchNorm")
        return torch.from_numpy(packed[:-1]).to(values.device), int(packed[-1])
    count = numpy.array([rows or 0])
    if rows is not None:
        replicas.reduce("sum", [count], "rows of SyncBatchNorm")
    total = values.clone()
    with cuda.in_order_of(total):
        replicas.reduce("sum", [array_of(total)], "SyncBatchNorm")
    return total, int(count[0])


class _Normalize(torch.autograd.Function):
    """Normalization by given statistics, which the inputs of all replicas have a part in."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: Any, bias: Any, eps: float, statistics: _Statistics, replicas: Replicas
    ) -> torch.Tensor:
        dtype = _wide(x)
        inverse = (statistics.variance + eps).rsqrt().to(dtype).view(statistics.shape)
        normalized = (x.to(dtype) - statistics.mean.to(dtype).view(statistics.shape)) * inverse
        ctx.statistics, ctx.replicas = statistics, replicas
        ctx.save_for_backward(normalized, inverse, weight)
        if weight is None:  # what comes next may change it in place
            return normalized.to(x.dtype, copy=True)
        return (normalized * weight.view(statistics.shape) + bias.view(statistics.shape)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "SyncBatchNorm in training mode has no second derivatives (create_graph=True): they would lack what "
                "the statistics of all replicas do to them. For such a loss use a layer without statistics, such as "
                "torch.nn.LayerNorm or GroupNorm"
            )
        normalized, inverse, weight = ctx.saved_tensors
        statistics, gradient = ctx.statistics, gradients[0].to(normalized.dtype)
        axes, shape = statistics.axes, statistics.shape
        local = torch.stack([gradient.sum(axes), (gradient * normalized).sum(axes)])
        crossing.note()
        sums, _ = _sums(ctx.replicas, local.double().view(-1))
        mean, along = (sums / statistics.count).view(2, -1).to(local.dtype)
        of_input = (gradient - mean.view(shape) - normalized * along.view(shape)) * inverse
        of_weight = of_bias = None
        if weight is not None:
            of_input = of_input * weight.view(shape)
            of_bias, of_weight = local.to(weight.dtype)
        return of_input.to(gradients[0].dtype), of_weight, of_bias, None, None, None
