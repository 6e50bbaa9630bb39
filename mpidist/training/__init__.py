"""Training: losses of a global batch, checkpoints."""

from __future__ import annotations

from mpidist.training.checkpoint import Checkpoint
from mpidist.training.checkpoint_manager import CheckpointManager
from mpidist.training.losses import compute_average_loss, scale_regularization_loss

__all__ = ["Checkpoint", "CheckpointManager", "compute_average_loss", "scale_regularization_loss"]
