"""The public names: which they are, that each can be loaded, and that loading mpidist starts nothing."""

from __future__ import annotations

import ast
import configparser
import importlib
import inspect
import subprocess
import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import mpidist
from mpidist.jobs.schedulers import SCHEDULERS

ROOT = Path(__file__).resolve().parents[2]

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
    "World",
    "__version__",
    "all_gather",
    "all_gather_init",
    "all_gather_object",
    "all_reduce",
    "all_reduce_init",
    "all_to_all",
    "all_to_all_init",
    "barrier",
    "broadcast",
    "broadcast_init",
    "broadcast_object",
    "callbacks",
    "cluster_resolver",
    "compression",
    "compute_average_loss",
    "config",
    "coordinator",
    "data",
    "errors",
    "estimator",
    "experimental",
    "experimental_set_strategy",
    "feature_column",
    "gather",
    "gather_init",
    "get_replica_context",
    "get_strategy",
    "has_strategy",
    "in_cross_replica_context",
    "init",
    "local_rank",
    "local_size",
    "metrics",
    "new_world",
    "node",
    "optimizers",
    "parameter_server",
    "rank",
    "receive",
    "receive_init",
    "reduce_scatter",
    "reduce_scatter_init",
    "scale_regularization_loss",
    "send",
    "send_init",
    "size",
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

#: Methods whose hints are names of higher layers or of one another's modules, which only type checkers find.
WITHOUT_HINTS = {"Callback.model", "Callback.set_model", "ClusterCoordinator.restore_from", "RemoteValue.__init__"}


def test_dir_shows_the_public_names():
    assert set(dir(mpidist)) == PUBLIC
    assert set(mpidist.__all__) == PUBLIC


@pytest.mark.parametrize("namespace", NAMESPACES)
def test_dir_of_a_namespace_shows_its_names(namespace):
    assert set(dir(getattr(mpidist, namespace))) == NAMESPACES[namespace]


@pytest.mark.parametrize("module", [mpidist, mpidist.experimental], ids=lambda module: module.__name__)
def test_the_names_of_a_stub_are_those_of_its_module(module):
    stub = ast.parse(Path(module.__file__).with_suffix(".pyi").read_text())
    sources = {alias.asname: node.module for node in ast.walk(stub) if isinstance(node, ast.ImportFrom)
               for alias in node.names}  # fmt: skip
    aliases = {node.targets[0].id: node.value.id for node in stub.body if isinstance(node, ast.Assign)}
    declared = {node.target.id for node in stub.body if isinstance(node, ast.AnnAssign)}
    assert sorted({*sources, *aliases, *declared}) == dir(module)
    assert {type(node) for node in stub.body} <= {ast.Expr, ast.ImportFrom, ast.Assign, ast.AnnAssign}
    for name in {*sources, *aliases}:
        value, target = getattr(module, name), aliases.get(name, name)
        assert value.__name__ == (f"{sources[target]}.{name}" if inspect.ismodule(value) else target)


@pytest.mark.parametrize("name", sorted(PUBLIC - {"__version__"}))
def test_names_of_namespaces_are_those_of_their_all(name):
    value = getattr(mpidist, name)
    if inspect.ismodule(value):
        assert dir(value) == sorted(value.__all__)
        assert all(hasattr(value, each) for each in value.__all__)


def members(namespace: object) -> list[Any]:
    values = [getattr(namespace, name) for name in dir(namespace)]
    return [value for value in values if inspect.isclass(value) or inspect.isfunction(value) or inspect.ismodule(value)]


def with_hints() -> Iterator[tuple[str, object]]:
    """Yield the public classes and functions, and the public methods of these classes, with their qualified names."""
    namespaces = [mpidist, *filter(inspect.ismodule, members(mpidist))]
    for value in {
        id(value): value for each in namespaces for value in members(each) if not inspect.ismodule(value)
    }.values():
        yield value.__qualname__, value
        for name in dir(value) if inspect.isclass(value) else ():
            method = inspect.getattr_static(value, name)
            method = getattr(method, "fget", getattr(method, "__func__", method))
            if inspect.isfunction(method) and (name == "__init__" or not name.startswith("_")):
                yield method.__qualname__, method


def test_hints_of_public_names_are_found_while_a_program_runs():
    found = dict(with_hints())
    assert {"ReplicaContext", "Variable", "SGD.__init__", "Strategy.gather", "Callback"} <= set(found)
    assert typing.get_type_hints(mpidist.ReplicaContext)["strategy"] is mpidist.Strategy
    missing = set()
    for name, value in found.items():
        try:
            typing.get_type_hints(value)
        except NameError:
            missing.add(name)
    assert missing == WITHOUT_HINTS


def test_files_that_the_package_needs_are_installed_with_it():
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    patterns = {(package, pattern) for package, pattern in config["options.package_data"].items()}
    files = {("mpidist", "py.typed"), ("*", "*.pyi"), ("mpidist.device", "*.cu"), ("mpidist.jobs", "templates/*.sh")}
    assert patterns == files
    others = {path.relative_to(ROOT / "mpidist") for path in (ROOT / "mpidist").rglob("*.*")}
    named = {str(path) for path in others if path.suffix not in (".py", ".pyc")}
    kernels = {
        f"device/{name}.cu" for name in ("blocks", "convert", "judge", "mark", "measure", "move", "total", "update")
    }
    templates = {f"jobs/templates/{name}.sh" for name in ("base", "hosts", *SCHEDULERS)}
    assert named == {"py.typed", "__init__.pyi", "experimental/__init__.pyi", *kernels, *templates}


def test_names_are_importable_from_namespaces():
    from mpidist.cluster_resolver import SlurmClusterResolver
    from mpidist.data import Dataset
    from mpidist.experimental import MultiWorkerMirroredStrategy

    assert MultiWorkerMirroredStrategy is mpidist.MultiWorkerMirroredStrategy
    assert Dataset is mpidist.data.Dataset
    assert SlurmClusterResolver is mpidist.cluster_resolver.SlurmClusterResolver
    assert importlib.import_module("mpidist.experimental") is mpidist.experimental


@pytest.mark.parametrize("where", ["", ".experimental", ".cluster_resolver", ".data", ".errors", ".optimizers"])
def test_an_unknown_name_is_an_attribute_error(where):
    module = importlib.import_module(f"mpidist{where}")
    with pytest.raises(AttributeError, match="no attribute 'Zyx'"):
        _ = module.Zyx
    assert not hasattr(module, "Zyx") and getattr(module, "__wrapped__", None) is None


@pytest.mark.parametrize("seed", range(3))
def test_threads_may_load_names_in_any_order(seed):
    code = f"""
import random, sys, threading
import mpidist

def load(number):
    names = list(mpidist.__all__)
    random.Random({seed} * 8 + number).shuffle(names)
    begin.wait()
    try:
        for name in names:
            getattr(mpidist, name)
    except Exception as error:
        errors.append(repr(error))

begin, errors = threading.Barrier(8), []
sys.setswitchinterval(1e-5)
threads = [threading.Thread(target=load, args=(number,)) for number in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
sys.exit("; ".join(errors) or None)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr


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
