"""Partitioners, under their public name."""

from mpidist.hints import public_module
from mpidist.parameter_server.partitioners import *  # noqa: F403
from mpidist.parameter_server.partitioners import __all__ as __all__

public_module(__name__)
