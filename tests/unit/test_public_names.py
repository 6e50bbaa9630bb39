"""The public names: which they are, that each can be loaded, and that loading mpidist starts nothing."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

import mpidist

#: The public names, as documented.
PUBLIC = {
    "AutoShardPolicy",
    "CentralStorageStrategy",
    "Checkpoint",
    "CheckpointManager",
    "ClusterSpec",
    "CollectiveCommunication",
    "CommunicationImplementation",
    "CommunicationOptions",
    "CrossDeviceOps",
    "DistributedDataset",
    "DistributedIterator",
    "DistributedValues",
    "HierarchicalCopyAllReduce",
    "IndexedSlices",
    "InputContext",
    "InputOptions",
    "InputReplicationMode",
    "MirroredStrategy",
    "MultiWorkerMirroredStrategy",
    "NcclAllReduce",
    "OneDeviceStrategy",
    "ParameterServerStrategy",
    "ReduceOp",
    "ReductionToOneDevice",
    "ReplicaContext",
    "RingAllReduce",
    "RunOptions",
    "SidecarEvaluator",
    "Strategy",
    "StrategyExtended",
    "TPUStrategy",
    "Trainer",
    "Variable",
    "VariableAggregation",
    "VariableSynchronization",
    "__version__",
    "callbacks",
    "cluster_resolver",
    "compute_average_loss",
    "config",
    "coordinator",
    "data",
    "errors",
    "experimental",
    "experimental_set_strategy",
    "get_replica_context",
    "get_strategy",
    "has_strategy",
    "in_cross_replica_context",
    "metrics",
    "optimizers",
    "parameter_server",
    "scale_regularization_loss",
    "testing",
    "tpu",
}

#: The public names inside namespaces that are not modules of their own.
NAMESPACES = {
    "config": {"experimental_connect_to_cluster", "experimental_connect_to_host", "list_physical_devices"},
    "data": {"AUTOTUNE", "ArraySpec", "AutoShardPolicy", "Dataset", "Options"},
    "experimental": {
        "CentralStorageStrategy",
        "CollectiveCommunication",
        "CollectiveHints",
        "CommunicationImplementation",
        "CommunicationOptions",
        "MultiWorkerMirroredStrategy",
        "ParameterServerStrategy",
        "PreemptionCheckpointHandler",
        "TPUStrategy",
        "TerminationConfig",
        "ValueContext",
        "coordinator",
        "partitioners",
    },
}


def test_dir_shows_the_public_names():
    assert set(dir(mpidist)) == PUBLIC
    assert set(mpidist.__all__) == PUBLIC


@pytest.mark.parametrize("namespace", NAMESPACES)
def test_dir_of_a_namespace_shows_its_names(namespace):
    assert set(dir(getattr(mpidist, namespace))) == NAMESPACES[namespace]


@pytest.mark.parametrize("name", sorted(mpidist._NAMES))
def test_every_name_resolves(name):
    value = mpidist
    for part in name.split("."):
        value = getattr(value, part)
    _, _, attribute = mpidist._NAMES[name].partition(":")
    assert not attribute or getattr(value, "__name__", attribute) == attribute


def test_names_are_importable_from_namespaces():
    from mpidist.cluster_resolver import SlurmClusterResolver
    from mpidist.data import Dataset
    from mpidist.experimental import MultiWorkerMirroredStrategy

    assert MultiWorkerMirroredStrategy is mpidist.MultiWorkerMirroredStrategy
    assert Dataset is mpidist.data.Dataset
    assert SlurmClusterResolver is mpidist.cluster_resolver.SlurmClusterResolver
    assert importlib.import_module("mpidist.experimental") is mpidist.experimental


@pytest.mark.parametrize("where", ["", ".experimental", ".cluster_resolver"])
def test_an_unknown_name_is_an_attribute_error(where):
    module = importlib.import_module(f"mpidist{where}")
    with pytest.raises(AttributeError, match="NoSuchStrategy"):
        _ = module.NoSuchStrategy


def test_importing_mpidist_loads_no_array_mpi_or_file_library():
    code = "import mpidist, sys; print(sorted({'numpy', 'mpi4py', 'h5py', 'cupy'} & set(sys.modules)))"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert child.stdout.strip() == "[]"


def test_using_the_names_does_not_load_mpi():
    code = (
        "import mpidist, sys\n"
        "mpidist.MultiWorkerMirroredStrategy, mpidist.Variable, mpidist.data.Dataset, mpidist.optimizers.SGD\n"
        "print(sorted({'mpi4py.MPI', 'cupy'} & set(sys.modules)))"
    )
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert child.stdout.strip() == "[]"
