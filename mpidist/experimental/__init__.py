"""Names that TensorFlow has under ``tf.distribute.experimental``; ``__init__.pyi`` says where each comes from."""

from mpidist.lazy_names import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
