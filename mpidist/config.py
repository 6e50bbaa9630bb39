"""Names that TensorFlow has under ``tf.config``."""

from typing import TYPE_CHECKING

from mpidist.arrays import list_physical_devices
from mpidist.cluster.connecting import experimental_connect_to_cluster, experimental_connect_to_host
from mpidist.hints import public_module

__all__ = ["experimental_connect_to_cluster", "experimental_connect_to_host", "list_physical_devices"]

if not TYPE_CHECKING:
    __getattr__, __dir__ = public_module(__name__)
