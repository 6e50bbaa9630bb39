"""PyTorch on MPI ranks; `mpidist.torch` has the public names."""
