"""The adapter of JAX: trees of gradients, and collectives through which gradients flow."""

from mpidist.frameworks.jax.broadcast import broadcast_tree
from mpidist.frameworks.jax.gradients import all_gather, all_reduce
from mpidist.frameworks.jax.optimizer import distributed
from mpidist.frameworks.jax.reduction import TreeReduction, reduce_tree

__all__ = ["TreeReduction", "all_gather", "all_reduce", "broadcast_tree", "distributed", "reduce_tree"]
