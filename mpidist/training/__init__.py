"""Training: losses of a global batch, checkpoints, `Trainer` and its callbacks, metrics, `Estimator`."""
