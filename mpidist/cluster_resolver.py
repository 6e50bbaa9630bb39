"""The cluster resolvers, under their public name."""

from typing import TYPE_CHECKING

from mpidist.cluster.resolvers import *  # noqa: F403
from mpidist.cluster.resolvers import __all__ as __all__
from mpidist.hints import public_module

if not TYPE_CHECKING:
    __getattr__, __dir__ = public_module(__name__)
