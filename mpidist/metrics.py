"""The metrics, under their public name."""

from mpidist.hints import public_module
from mpidist.training.metrics import *  # noqa: F403
from mpidist.training.metrics import __all__ as __all__

public_module(__name__)
