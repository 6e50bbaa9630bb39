"""Every way to spell a public name."""

import mpidist
import mpidist.callbacks
import mpidist.data
import mpidist.experimental
import mpidist.optimizers as O
import mpidist.optimizers.schedules
from mpidist import MirroredStrategy, cluster_resolver, errors, optimizers
from mpidist.callbacks import EarlyStopping
from mpidist.cluster_resolver import SimpleClusterResolver, UnionClusterResolver, UnionResolver
from mpidist.config import list_physical_devices
from mpidist.coordinator import ClusterCoordinator
from mpidist.data import AUTOTUNE, Dataset
from mpidist.errors import CheckpointError
from mpidist.experimental import CollectiveHints, MultiWorkerMirroredStrategy, coordinator, partitioners
from mpidist.experimental.coordinator import RemoteValue
from mpidist.experimental.partitioners import MaxSizePartitioner
from mpidist.metrics import Mean
from mpidist.optimizers.schedules import CosineDecay
from mpidist.parameter_server import StaleSynchronous
from mpidist.testing import run_ranks
from mpidist.tpu.experimental import Topology

strategies: list[type[mpidist.Strategy]] = [MirroredStrategy, mpidist.MirroredStrategy, MultiWorkerMirroredStrategy]
rates: list[type[O.schedules.LearningRateSchedule]] = [CosineDecay, mpidist.optimizers.schedules.Constant]
families: list[type[O.Optimizer]] = [optimizers.SGD, O.SGD, mpidist.optimizers.Adam]
sets: list[type[Dataset]] = [mpidist.data.Dataset]
stops: list[type[mpidist.callbacks.Callback]] = [EarlyStopping]
resolvers: list[type[cluster_resolver.ClusterResolver]] = [SimpleClusterResolver, UnionClusterResolver, UnionResolver]
hints: list[type[mpidist.CommunicationOptions]] = [CollectiveHints, mpidist.experimental.CommunicationOptions]
coordinators: list[type[ClusterCoordinator]] = [coordinator.ClusterCoordinator, mpidist.coordinator.ClusterCoordinator]
splits: list[type[partitioners.Partitioner]] = [MaxSizePartitioner, mpidist.experimental.partitioners.Partitioner]
remote: type[mpidist.coordinator.RemoteValue] = RemoteValue
failures: list[type[errors.MpidistError]] = [CheckpointError, mpidist.errors.LaunchError]
policies = [StaleSynchronous(2), mpidist.parameter_server.Asynchronous()]
way: mpidist.CommunicationImplementation = mpidist.CollectiveCommunication.AUTO
mesh: type[mpidist.tpu.experimental.Topology] = Topology
version: str = mpidist.__version__
totals: list[int] = run_ranks(2, lambda: 1)
names: list[str] = [device.name for device in list_physical_devices()]
mean: float = float(Mean().result())
Dataset.range(8).prefetch(AUTOTUNE)
