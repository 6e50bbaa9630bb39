"""Training of JAX models on MPI ranks: `reduce_tree` for gradients, `broadcast_tree` for parameters, and optax."""

from mpidist.errors import MissingDependencyError
from mpidist.hints import public_module
from mpidist.packages import pip_install

try:
    import jax as _jax  # noqa: F401
except ImportError as error:
    raise MissingDependencyError(f"mpidist.jax needs JAX: {pip_install('jax')} ({error})") from error

from mpidist.frameworks.jax.broadcast import broadcast_tree
from mpidist.frameworks.jax.gradients import all_gather, all_reduce
from mpidist.frameworks.jax.optimizer import distributed
from mpidist.frameworks.jax.own_device import device
from mpidist.frameworks.jax.reduction import TreeReduction, reduce_tree

__all__ = ["TreeReduction", "all_gather", "all_reduce", "broadcast_tree", "device", "distributed", "reduce_tree"]

public_module(__name__)
