"""PyTorch models train on MPI ranks: Horovod's names, `DistributedDataParallel`, and what they are made of."""

from types import SimpleNamespace
from typing import TYPE_CHECKING

from mpidist.compression import BFloat16, Float16
from mpidist.errors import MissingDependencyError
from mpidist.hints import public_module

try:
    import torch as _torch
except ImportError as error:
    raise MissingDependencyError(f"mpidist.torch needs PyTorch: pip install 'mpidist[torch]' ({error})") from error

from mpidist.frameworks.torch.batch_norm import SyncBatchNorm as SyncBatchNorm
from mpidist.frameworks.torch.broadcast import broadcast_optimizer_state as broadcast_optimizer_state
from mpidist.frameworks.torch.broadcast import broadcast_parameters as broadcast_parameters
from mpidist.frameworks.torch.comm_hook import comm_hook as comm_hook
from mpidist.frameworks.torch.data_parallel import DistributedDataParallel as DistributedDataParallel
from mpidist.frameworks.torch.losses import compute_average_loss as compute_average_loss
from mpidist.frameworks.torch.optimizer import DistributedOptimizer as DistributedOptimizer
from mpidist.frameworks.torch.sampler import DistributedSampler as DistributedSampler

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
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = public_module(__name__)
