"""The public names of mpidist, each with the place it is loaded from: for type checkers, and for the package itself."""

from mpidist import callbacks as callbacks
from mpidist import cluster_resolver as cluster_resolver
from mpidist import config as config
from mpidist import coordinator as coordinator
from mpidist import data as data
from mpidist import errors as errors
from mpidist import experimental as experimental
from mpidist import metrics as metrics
from mpidist import optimizers as optimizers
from mpidist import parameter_server as parameter_server
from mpidist import testing as testing
from mpidist import tpu as tpu
from mpidist.cluster.spec import ClusterSpec as ClusterSpec
from mpidist.context import experimental_set_strategy as experimental_set_strategy
from mpidist.context import has_strategy as has_strategy
from mpidist.context import in_cross_replica_context as in_cross_replica_context
from mpidist.cross_device_ops import CrossDeviceOps as CrossDeviceOps
from mpidist.cross_device_ops import HierarchicalCopyAllReduce as HierarchicalCopyAllReduce
from mpidist.cross_device_ops import NcclAllReduce as NcclAllReduce
from mpidist.cross_device_ops import ReductionToOneDevice as ReductionToOneDevice
from mpidist.cross_device_ops import RingAllReduce as RingAllReduce
from mpidist.input.distributed import DistributedDataset as DistributedDataset
from mpidist.input.distributed import DistributedIterator as DistributedIterator
from mpidist.input.from_function import InputContext as InputContext
from mpidist.input.options import AutoShardPolicy as AutoShardPolicy
from mpidist.input.options import InputOptions as InputOptions
from mpidist.input.options import InputReplicationMode as InputReplicationMode
from mpidist.options import CommunicationImplementation as CommunicationImplementation
from mpidist.options import CommunicationOptions as CommunicationOptions
from mpidist.options import ReduceOp as ReduceOp
from mpidist.options import VariableAggregation as VariableAggregation
from mpidist.options import VariableSynchronization as VariableSynchronization
from mpidist.strategies.base import ReplicaContext as ReplicaContext
from mpidist.strategies.base import Strategy as Strategy
from mpidist.strategies.central_storage import CentralStorageStrategy as CentralStorageStrategy
from mpidist.strategies.current import get_replica_context as get_replica_context
from mpidist.strategies.current import get_strategy as get_strategy
from mpidist.strategies.extended import StrategyExtended as StrategyExtended
from mpidist.strategies.mirrored import MirroredStrategy as MirroredStrategy
from mpidist.strategies.multi_worker_mirrored import MultiWorkerMirroredStrategy as MultiWorkerMirroredStrategy
from mpidist.strategies.one_device import OneDeviceStrategy as OneDeviceStrategy
from mpidist.strategies.parameter_server import ParameterServerStrategy as ParameterServerStrategy
from mpidist.strategies.run_options import RunOptions as RunOptions
from mpidist.strategies.tpu.strategy import TPUStrategy as TPUStrategy
from mpidist.training.checkpoint import Checkpoint as Checkpoint
from mpidist.training.checkpoint_manager import CheckpointManager as CheckpointManager
from mpidist.training.evaluator import SidecarEvaluator as SidecarEvaluator
from mpidist.training.losses import compute_average_loss as compute_average_loss
from mpidist.training.losses import scale_regularization_loss as scale_regularization_loss
from mpidist.training.trainer import Trainer as Trainer
from mpidist.variables import DistributedValues as DistributedValues
from mpidist.variables import IndexedSlices as IndexedSlices
from mpidist.variables import Variable as Variable

CollectiveCommunication = CommunicationImplementation
__version__: str
