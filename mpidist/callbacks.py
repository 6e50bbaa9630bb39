"""The callbacks, under their public name."""

from mpidist.hints import public_module
from mpidist.training.callbacks import *  # noqa: F403
from mpidist.training.callbacks import __all__ as __all__

public_module(__name__)
