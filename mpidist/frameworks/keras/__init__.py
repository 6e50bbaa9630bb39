"""Keras 3 models on the replicas of a strategy, with the backends JAX and PyTorch; `mpidist.keras` has the names."""

from mpidist.frameworks.private_names import require

require("keras")
