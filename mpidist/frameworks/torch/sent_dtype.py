"""What PyTorch's own settings say of the dtype in which gradients travel, as a compression of mpidist."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mpidist.compression import BFloat16, Compression, Float16
from mpidist.errors import quoted
from mpidist.frameworks.torch.comm_hook import comm_hook

#: Where PyTorch has its hooks, which are known by name: a build may lack `torch.distributed`.
_HOOKS = "torch.distributed.algorithms.ddp_comm_hooks.default_hooks"

_OF_HOOK: dict[str, Callable[[], Compression] | None] = {
    "allreduce_hook": None,
    "fp16_compress_hook": Float16,
    "bf16_compress_hook": BFloat16,
}

_OF_DTYPE = {torch.float16: Float16, torch.bfloat16: BFloat16}


def of_hook(state: Any, hook: Any) -> Compression | None:
    """Return the compression that does what a communication hook does; None for a plain mean.  Local.

    Raises
    ------
    NotImplementedError
        It is another hook: those of mpidist's own class are not called with buckets.
    ValueError
        It is given a process group.
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

    Raises
    ------
    NotImplementedError
        They cast parameters or buffers, or reduce in a dtype that is no shorter float.
    """
    cast = [name for name in ("param_dtype", "buffer_dtype") if getattr(given, name, None) is not None]
    dtype = getattr(given, "reduce_dtype", None)
    if cast or (dtype is not None and dtype not in _OF_DTYPE):
        raise NotImplementedError(
            f"mixed_precision={quoted(given)}: mpidist.torch.DistributedDataParallel casts neither parameters nor "
            "buffers, and reduces in float16 or bfloat16 if asked. Compute inside of torch.autocast, and give "
            "reduce_dtype alone, or compression=mpidist.compression.Float16()"
        )
    return _OF_DTYPE[dtype]() if dtype is not None else None
