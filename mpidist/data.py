"""Names that TensorFlow has under ``tf.data``."""

from mpidist.hints import public_module
from mpidist.input.dataset import AUTOTUNE, Dataset
from mpidist.input.options import AutoShardPolicy, Options
from mpidist.input.stage import ArraySpec

__all__ = ["AUTOTUNE", "ArraySpec", "AutoShardPolicy", "Dataset", "Options"]

public_module(__name__)
