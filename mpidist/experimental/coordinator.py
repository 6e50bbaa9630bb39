"""The coordinator style of parameter servers, under the name that it had in TensorFlow at first."""

from mpidist.hints import public_module
from mpidist.parameter_server.coordinator import *  # noqa: F403
from mpidist.parameter_server.coordinator import __all__ as __all__

public_module(__name__)
