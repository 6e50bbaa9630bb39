"""The cluster resolvers, under their public name."""

from mpidist.cluster.resolvers import *  # noqa: F403
from mpidist.cluster.resolvers import __all__ as __all__
from mpidist.hints import public_module

public_module(__name__)
