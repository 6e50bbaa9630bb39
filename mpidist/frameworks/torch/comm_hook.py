"""A communication hook: PyTorch's own `DistributedDataParallel` reduces by mpidist.

It looks at the hook's annotations, which therefore are no strings here.
"""

from typing import Any

import torch

from mpidist.frameworks.torch import cuda
from mpidist.frameworks.torch.replicas import replicas_of
from mpidist.frameworks.torch.tensors import array_of, check_memory


def comm_hook(state: Any, bucket: torch.distributed.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket of gradients over all replicas: ``model.register_comm_hook(None, mpidist.torch.comm_hook)``.

    Collective: PyTorch calls it for the same buckets in the same order on every rank.

    Parameters
    ----------
    state : Strategy or None
        None for the strategy in force, or all ranks.
    bucket : torch.distributed.GradBucket

    Raises
    ------
    RuntimeError
        The process group has another number of ranks.
    NotImplementedError
        A bucket on a device that is not CUDA's.
    """
    replicas = replicas_of(state)
    ranks = torch.distributed.get_world_size()
    if ranks != replicas.size:
        raise RuntimeError(
            f"the process group has {ranks} ranks, and mpidist has {replicas.size}: start both with the same ranks"
        )
    buffer = bucket.buffer()
    check_memory([("bucket", buffer)], None)
    with cuda.in_order_of(buffer):
        replicas.reduce("mean", [array_of(buffer)], "bucket")
    # it makes those that wait for it wait for the streams of these devices
    devices = [buffer.device] if cuda.has(buffer) else None
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=devices)
    future.set_result(buffer)
    return future
