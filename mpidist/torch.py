"""PyTorch models train on MPI ranks: Horovod's names, `DistributedDataParallel`, and what they are made of."""

from types import SimpleNamespace

from mpidist.compression import BFloat16, Float16
from mpidist.errors import MissingDependencyError
from mpidist.hints import public_module
from mpidist.packages import pip_install

try:
    import torch as _torch
except ImportError as error:
    raise MissingDependencyError(f"mpidist.torch needs PyTorch: {pip_install('torch')} ({error})") from error

from mpidist.frameworks.torch import horovod_names
from mpidist.frameworks.torch.batch_norm import SyncBatchNorm
from mpidist.frameworks.torch.broadcast import broadcast_optimizer_state, broadcast_parameters
from mpidist.frameworks.torch.collectives import all_gather, all_reduce, all_to_all, reduce_scatter
from mpidist.frameworks.torch.comm_hook import comm_hook
from mpidist.frameworks.torch.data_parallel import DistributedDataParallel
from mpidist.frameworks.torch.distribution import compute_average_loss
from mpidist.frameworks.torch.horovod_names import *  # noqa: F403
from mpidist.frameworks.torch.optimizer import DistributedOptimizer
from mpidist.frameworks.torch.own_device import device
from mpidist.frameworks.torch.sampler import DistributedSampler

del _torch

#: Horovod's names of the stages in `mpidist.compression`.
Compression = SimpleNamespace(none=None, fp16=Float16(), bf16=BFloat16())

__all__ = [
    "Compression",
    "DistributedDataParallel",
    "DistributedOptimizer",
    "DistributedSampler",
    "SyncBatchNorm",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "comm_hook",
    "compute_average_loss",
    "device",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "reduce_scatter",
]
__all__ += horovod_names.__all__

public_module(__name__)
