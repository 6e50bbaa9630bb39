"""A mesh of ranks under TensorFlow's names for TPUs."""

from mpidist.hints import public_module
from mpidist.tpu import experimental

__all__ = ["experimental"]

public_module(__name__)
