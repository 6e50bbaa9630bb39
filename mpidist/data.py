"""Names that TensorFlow has under ``tf.data``."""

from typing import TYPE_CHECKING

from mpidist.hints import public_module
from mpidist.input.dataset import AUTOTUNE, Dataset
from mpidist.input.options import AutoShardPolicy, Options
from mpidist.input.stage import ArraySpec

__all__ = ["AUTOTUNE", "ArraySpec", "AutoShardPolicy", "Dataset", "Options"]

if not TYPE_CHECKING:
    __getattr__, __dir__ = public_module(__name__)
