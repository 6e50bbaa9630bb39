"""PyTorch models train on MPI ranks: Horovod's names, `DistributedDataParallel`, and what they are made of."""

from types import SimpleNamespace
from typing import TYPE_CHECKING

from mpidist.compression import BFloat16, Float16
from mpidist.errors import MissingDependencyError
from mpidist.hints import public_module
from mpidist.packages import pip_install

try:
    import torch as _torch
except ImportError as error:
    raise MissingDependencyError(f"mpidist.torch needs PyTorch: {pip_install('torch')} ({error})") from error

from mpidist.frameworks.torch.batch_norm import SyncBatchNorm as SyncBatchNorm
from mpidist.frameworks.torch.broadcast import broadcast_optimizer_state as broadcast_optimizer_state
from mpidist.frameworks.torch.broadcast import broadcast_parameters as broadcast_parameters
from mpidist.frameworks.torch.collectives import all_gather as all_gather
from mpidist.frameworks.torch.collectives import all_reduce as all_reduce
from mpidist.frameworks.torch.collectives import all_to_all as all_to_all
from mpidist.frameworks.torch.collectives import reduce_scatter as reduce_scatter
from mpidist.frameworks.torch.comm_hook import comm_hook as comm_hook
from mpidist.frameworks.torch.data_parallel import DistributedDataParallel as DistributedDataParallel
from mpidist.frameworks.torch.horovod_names import Average as Average
from mpidist.frameworks.torch.horovod_names import Max as Max
from mpidist.frameworks.torch.horovod_names import Min as Min
from mpidist.frameworks.torch.horovod_names import Product as Product
from mpidist.frameworks.torch.horovod_names import Sum as Sum
from mpidist.frameworks.torch.horovod_names import allgather as allgather
from mpidist.frameworks.torch.horovod_names import allgather_async as allgather_async
from mpidist.frameworks.torch.horovod_names import allgather_object as allgather_object
from mpidist.frameworks.torch.horovod_names import allreduce as allreduce
from mpidist.frameworks.torch.horovod_names import allreduce_ as allreduce_
from mpidist.frameworks.torch.horovod_names import allreduce_async as allreduce_async
from mpidist.frameworks.torch.horovod_names import allreduce_async_ as allreduce_async_
from mpidist.frameworks.torch.horovod_names import alltoall as alltoall
from mpidist.frameworks.torch.horovod_names import alltoall_async as alltoall_async
from mpidist.frameworks.torch.horovod_names import barrier as barrier
from mpidist.frameworks.torch.horovod_names import broadcast as broadcast
from mpidist.frameworks.torch.horovod_names import broadcast_ as broadcast_
from mpidist.frameworks.torch.horovod_names import broadcast_async as broadcast_async
from mpidist.frameworks.torch.horovod_names import broadcast_async_ as broadcast_async_
from mpidist.frameworks.torch.horovod_names import broadcast_object as broadcast_object
from mpidist.frameworks.torch.horovod_names import grouped_allreduce as grouped_allreduce
from mpidist.frameworks.torch.horovod_names import grouped_allreduce_ as grouped_allreduce_
from mpidist.frameworks.torch.horovod_names import grouped_allreduce_async as grouped_allreduce_async
from mpidist.frameworks.torch.horovod_names import grouped_allreduce_async_ as grouped_allreduce_async_
from mpidist.frameworks.torch.horovod_names import init as init
from mpidist.frameworks.torch.horovod_names import is_initialized as is_initialized
from mpidist.frameworks.torch.horovod_names import local_rank as local_rank
from mpidist.frameworks.torch.horovod_names import local_size as local_size
from mpidist.frameworks.torch.horovod_names import poll as poll
from mpidist.frameworks.torch.horovod_names import rank as rank
from mpidist.frameworks.torch.horovod_names import reducescatter as reducescatter
from mpidist.frameworks.torch.horovod_names import reducescatter_async as reducescatter_async
from mpidist.frameworks.torch.horovod_names import shutdown as shutdown
from mpidist.frameworks.torch.horovod_names import size as size
from mpidist.frameworks.torch.horovod_names import synchronize as synchronize
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
    "broadcast",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "reduce_scatter",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = public_module(__name__)
