"""tf.distribute.Strategy for MPI ranks, on NumPy and CuPy arrays.

The public names are the imports of ``__init__.pyi``.  Each is loaded on first use, so that ``import mpidist`` starts
neither MPI nor CUDA.
"""

from mpidist.lazy_names import lazy_names

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
__all__ += ["__version__"]
