"""The device of a rank, as JAX has it."""

from __future__ import annotations

import jax

from mpidist.frameworks.own_device import own_gpu


def device() -> jax.Device:
    """Return this rank's GPU, which becomes JAX's default device; the CPU where it has no GPU.

    Ranks of a node take the GPUs that they see in turn; a rank to which the launcher shows one GPU has that one.  The
    scope of a strategy has the strategy's.  Called before any other use of JAX, it has JAX start on this GPU alone: JAX
    takes most of the memory of all that it sees.  With logging at level INFO the chief shows which rank has which card.

    Collective at the first call; Local later, and in a scope.

    Raises
    ------
    DeviceError
        A rank cannot use its GPU; on all ranks.
    """
    gpu = own_gpu(lambda: len(_gpus()))
    if gpu is not None:
        jax.config.update("jax_cuda_visible_devices", str(gpu))  # without effect where JAX has started
    if gpu is None or not _gpus():  # CuPy may see GPUs where JAX is one for CPUs
        return jax.local_devices(backend="cpu")[0]
    found = min(_gpus(), key=lambda each: each.local_hardware_id != gpu)
    jax.config.update("jax_default_device", found)
    return found


def _gpus() -> list[jax.Device]:
    return [each for each in jax.local_devices() if each.platform == "gpu"]
