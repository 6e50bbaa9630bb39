"""Collectives for autograd, the gradient library of NumPy: gradients flow through them."""

from mpidist.errors import MissingDependencyError
from mpidist.hints import public_module
from mpidist.packages import pip_install

try:
    import autograd as _autograd  # noqa: F401
except ImportError as error:
    raise MissingDependencyError(f"mpidist.autograd needs autograd: {pip_install('autograd')} ({error})") from error

from mpidist.frameworks.autograd import all_gather, all_reduce

__all__ = ["all_gather", "all_reduce"]

public_module(__name__)
