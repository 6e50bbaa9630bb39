"""The device of a rank, as JAX has it."""

from __future__ import annotations

import jax

from mpidist.errors import DeviceError
from mpidist.frameworks.own_device import own_gpu
from mpidist.world import world_communicator


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
    gpus = _gpus()
    own = gpus if len(gpus) == 1 else [each for each in gpus if each.local_hardware_id == gpu]
    if gpu is None or not gpus:  # CuPy may see GPUs where JAX is one for CPUs
        own = jax.local_devices(backend="cpu")
    if not own:
        raise DeviceError(
            f"rank {world_communicator().rank}: JAX has started without GPU {gpu}, which this rank has: its GPUs are "
            f"{', '.join(map(str, gpus))}. Call mpidist.jax.device() before JAX is used"
        )
    jax.config.update("jax_default_device", own[0])
    return own[0]


def _gpus() -> list[jax.Device]:
    return [each for each in jax.local_devices() if each.platform == "gpu"]
