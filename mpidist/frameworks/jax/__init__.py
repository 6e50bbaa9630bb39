"""JAX on MPI ranks, trees of gradients and collectives through which they flow; `mpidist.jax` has the public names."""

from mpidist.frameworks.private_names import require

require("jax")
