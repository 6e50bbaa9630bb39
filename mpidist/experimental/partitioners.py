"""Partitioners, under their public name."""

from typing import TYPE_CHECKING

from mpidist.hints import public_module
from mpidist.parameter_server.partitioners import *  # noqa: F403
from mpidist.parameter_server.partitioners import __all__ as __all__

if not TYPE_CHECKING:
    __getattr__, __dir__ = public_module(__name__)
