"""A communication hook, by which PyTorch's own `DistributedDataParallel` reduces by mpidist.

And the compression of mpidist that does what PyTorch's hooks and settings say of the dtype in which gradients travel.

PyTorch looks at the hook's annotations, which therefore are no strings here.
"""

from collections.abc import Callable
from typing import Any

import torch

from mpidist.compression import BFloat16, Compression, Float16
from mpidist.errors import quoted
from mpidist.frameworks.torch import cuda
from mpidist.frameworks.torch.replicas import replicas_of
from mpidist.frameworks.torch.tensors import array_of, check_memory

#: Where PyTorch has its hooks, which are known by name: a build may lack `torch.distributed`.
_HOOKS = "torch.distributed.algorithms.ddp_comm_hooks.default_hooks"

_OF_HOOK: dict[str, Callable[[], Compression] | None] = {
    "allreduce_hook": None,
    "fp16_compress_hook": Float16,
    "bf16_compress_hook": BFloat16,
}

_OF_DTYPE = {torch.float16: Float16, torch.bfloat16: BFloat16}


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


def of_hook(state: Any, hook: Any) -> Compression | None:
    """Return the compression that does what a communication hook does; None for a plain mean.  Local.

    NotImplementedError for another hook: those of mpidist's own class are not called with buckets.  ValueError where it
    is given a process group.
    """
    name = getattr(hook, "__name__", quoted(hook))
    if hook is not comm_hook and (getattr(hook, "__module__", "") != _HOOKS or name not in _OF_HOOK):
        raise NotImplementedError(
            f"the hook {name} would be called with buckets, which mpidist.torch.DistributedDataParallel does not have. "
            f"It takes {', '.join(_OF_HOOK)}; give compression=, such as mpidist.compression.TopK, or register the "
            "hook with PyTorch's own class"
        )
    if state is not None:
        raise ValueError("state: mpidist knows its ranks from MPI; register the hook with None")
    make = None if hook is comm_hook else _OF_HOOK[name]
    return None if make is None else make()


def of_mixed_precision(given: Any) -> Compression | None:
    """Return the compression for the `reduce_dtype` of PyTorch's settings.  Local.

    TypeError for anything else.  NotImplementedError where they cast parameters, buffers or outputs, or reduce in a
    dtype that is no shorter float.
    """
    dtypes = [getattr(given, name, False) for name in ("param_dtype", "reduce_dtype")]
    if isinstance(given, type) or not all(each is None or isinstance(each, torch.dtype) for each in dtypes):
        raise TypeError(
            f"mixed_precision={quoted(given)}: it is None, or PyTorch's settings with dtypes as param_dtype and "
            "reduce_dtype, such as torch.distributed.fsdp.MixedPrecision(reduce_dtype=torch.float16); or leave it out, "
            "and give compression=mpidist.compression.Float16()"
        )
    others = ("param_dtype", "buffer_dtype", "output_dtype")
    cast = any(getattr(given, name, None) is not None for name in others)
    dtype = given.reduce_dtype
    if cast or (dtype is not None and dtype not in _OF_DTYPE):
        raise NotImplementedError(
            f"mixed_precision={quoted(given)}: mpidist.torch.DistributedDataParallel casts no parameters, "
            "buffers or outputs, and reduces in float16 or bfloat16 if asked. Compute inside of torch.autocast, and "
            "give reduce_dtype alone, or compression=mpidist.compression.Float16()"
        )
    return _OF_DTYPE[dtype]() if dtype is not None else None
