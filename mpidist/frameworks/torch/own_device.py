"""The device of a rank, as PyTorch has it."""

from __future__ import annotations

import torch

from mpidist.frameworks.own_device import own_gpu


def device() -> torch.device:
    """Return this rank's GPU, which becomes PyTorch's current one in this thread; the CPU where it has no GPU.

    Ranks of a node take the GPUs that they see in turn; a rank to which the launcher shows one GPU has that one.  The
    scope of a strategy has the strategy's.  With logging at level INFO the chief shows which rank has which card.

    Collective at the first call, before which nothing should use CUDA; Local later, and in a scope.

    Raises
    ------
    DeviceError
        A rank cannot use its GPU; on all ranks.
    """
    gpu = own_gpu(torch.cuda.device_count)
    if gpu is None or not torch.cuda.is_available():  # CuPy may see GPUs where PyTorch is one for CPUs
        return torch.device("cpu")
    torch.cuda.set_device(gpu)
    return torch.device("cuda", gpu)
