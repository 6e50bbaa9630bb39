"""The names of ``tf.tpu.experimental`` that have a meaning for a mesh of ranks."""

from mpidist.hints import public_module
from mpidist.strategies.tpu.device_assignment import DeviceAssignment
from mpidist.strategies.tpu.topology import MeshTopology as Topology
from mpidist.strategies.tpu.topology import initialize_tpu_system, shutdown_tpu_system

__all__ = ["DeviceAssignment", "Topology", "initialize_tpu_system", "shutdown_tpu_system"]

public_module(__name__)
