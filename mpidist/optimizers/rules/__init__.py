"""What optimizers do to an array in one step: pure functions of slices, one family a file."""
