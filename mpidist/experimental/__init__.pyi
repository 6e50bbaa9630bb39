"""The names of `mpidist.experimental`, each with the place it is loaded from."""

from mpidist.experimental import coordinator as coordinator
from mpidist.experimental import partitioners as partitioners
from mpidist.input.from_function import ValueContext as ValueContext
from mpidist.options import CommunicationImplementation as CommunicationImplementation
from mpidist.options import CommunicationOptions as CommunicationOptions
from mpidist.strategies.central_storage import CentralStorageStrategy as CentralStorageStrategy
from mpidist.strategies.multi_worker_mirrored import MultiWorkerMirroredStrategy as MultiWorkerMirroredStrategy
from mpidist.strategies.parameter_server import ParameterServerStrategy as ParameterServerStrategy
from mpidist.strategies.tpu.strategy import TPUStrategy as TPUStrategy
from mpidist.training.preemption import PreemptionCheckpointHandler as PreemptionCheckpointHandler
from mpidist.training.preemption import TerminationConfig as TerminationConfig

CollectiveCommunication = CommunicationImplementation
CollectiveHints = CommunicationOptions
