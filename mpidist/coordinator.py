"""The coordinator style of parameter servers, under its public name."""

from mpidist.hints import public_module
from mpidist.parameter_server.coordinator import *  # noqa: F403
from mpidist.parameter_server.coordinator import __all__ as __all__

public_module(__name__)
