"""PyTorch on MPI ranks; `mpidist.torch` has the public names."""

from mpidist.frameworks.private_names import require

require("torch")
