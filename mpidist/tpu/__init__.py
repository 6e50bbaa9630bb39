"""A mesh of ranks under TensorFlow's names for TPUs."""

from typing import TYPE_CHECKING

from mpidist.hints import public_module
from mpidist.tpu import experimental

__all__ = ["experimental"]

if not TYPE_CHECKING:
    __getattr__, __dir__ = public_module(__name__)
