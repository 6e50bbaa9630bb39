"""The table of names: it has every name of ``tf.distribute``, and what it says of ours is true."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import NamedTuple

import pytest

import mpidist

PAGE = Path(__file__).resolve().parents[2] / "docs" / "from_tf_distribute.md"

#: What TensorFlow 2 exports, with the old names that its guides use.
TF_DISTRIBUTE = {
    "": "CrossDeviceOps DistributedDataset DistributedIterator DistributedValues HierarchicalCopyAllReduce "
    "InputContext InputOptions InputReplicationMode MirroredStrategy MultiWorkerMirroredStrategy NcclAllReduce "
    "OneDeviceStrategy ParameterServerStrategy ReduceOp ReductionToOneDevice ReplicaContext RunOptions Server Strategy "
    "StrategyExtended TPUStrategy experimental_set_strategy get_loss_reduction get_replica_context get_strategy "
    "has_strategy in_cross_replica_context",
    "cluster_resolver.": "ClusterResolver GCEClusterResolver KubernetesClusterResolver SimpleClusterResolver "
    "SlurmClusterResolver TFConfigClusterResolver TPUClusterResolver UnionResolver",
    "coordinator.": "ClusterCoordinator PerWorkerValues RemoteValue experimental_get_current_worker_index",
    "experimental.": "CentralStorageStrategy CollectiveCommunication CollectiveHints CommunicationImplementation "
    "CommunicationOptions MultiWorkerMirroredStrategy ParameterServerStrategy PreemptionCheckpointHandler "
    "PreemptionWatcher TPUStrategy TerminationConfig ValueContext",
    "experimental.coordinator.": "ClusterCoordinator PerWorkerValues RemoteValue",
    "experimental.partitioners.": "FixedShardsPartitioner MaxSizePartitioner MinSizePartitioner Partitioner",
    "experimental.rpc.": "Client Server",
}

#: What the page calls an object -> its class here.
OBJECTS = {
    "strategy.extended": mpidist.StrategyExtended,
    "strategy": mpidist.TPUStrategy,
    "replica_context": mpidist.ReplicaContext,
    "dist_dataset": mpidist.DistributedDataset,
    "iterator": mpidist.DistributedIterator,
    "input_context": mpidist.InputContext,
    "resolver": mpidist.cluster_resolver.ClusterResolver,
}


class Row(NamedTuple):
    """A row of a table: TensorFlow's name, ours (or why there is none), and what differs."""

    theirs: str
    ours: str
    differs: str


def rows() -> list[Row]:
    found = re.findall(r"^\| *(.*?) *\| *(.*?) *\| *(.*?) *\|$", PAGE.read_text(), re.MULTILINE)
    return [Row(*cells) for cells in found if cells[0] != "TensorFlow" and not cells[0].startswith("-")]


ROWS = rows()


def exists(name: str) -> bool:
    """Return whether there is such a name below mpidist, or a member of an object."""
    if name.startswith("mpidist."):
        value: object = mpidist
        for part in name.split(".")[1:]:
            if not hasattr(value, part):
                return False
            value = getattr(value, part)
        return True
    owner, member = next((cls, name[len(word) + 1 :]) for word, cls in OBJECTS.items() if name.startswith(f"{word}."))
    return hasattr(owner, member) or any(member in _set_by(cls) for cls in owner.__mro__)


def _set_by(cls: type) -> set[str]:
    """Return the attributes that a class declares, or sets in its constructor."""
    init = cls.__dict__.get("__init__")
    code = inspect.getsource(init) if inspect.isfunction(init) else ""
    return {*re.findall(r"self\.(\w+)(?:: [^=]+)? = ", code), *cls.__dict__.get("__annotations__", {})}


def test_every_name_of_tf_distribute_has_a_row():
    names = {f"`tf.distribute.{space}{name}`" for space, text in TF_DISTRIBUTE.items() for name in text.split()}
    assert names - {row.theirs for row in ROWS} == set()


def test_every_method_of_a_strategy_or_replica_has_a_row():
    named = {row.ours.strip("`") for row in ROWS}
    classes = {word: OBJECTS[word] for word in ("strategy", "replica_context", "iterator")}
    public = {f"{word}.{name}" for word, cls in classes.items() for name in dir(cls) if not name.startswith("_")}
    own = {f"iterator.{name}" for name in ("state", "check", "restore")}
    own |= {"strategy.make_experimental_numpy_dataset", "strategy.distribute"}
    own |= {"strategy.broadcast", "strategy.barrier"}
    collectives = "broadcast all_to_all reduce_scatter gather send receive barrier".split()
    bound = [f"{name}_init" for name in ("all_reduce", "all_gather", *collectives) if name != "barrier"]
    own |= {f"replica_context.{name}" for name in (*collectives, *bound)}
    one_rank = {"gather_init", "send_init", "receive_init"}  # from or to one rank: of the replica alone
    own |= {f"strategy.{name}" for name in bound if name not in one_rank}
    assert public - named == own


def test_no_name_has_two_rows():
    theirs = [row.theirs for row in ROWS if row.theirs]
    assert len(theirs) == len(set(theirs)) > 100


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.theirs or row.ours)
def test_what_a_row_names_exists_and_what_it_says_is_missing_does_not(row):
    if row.ours.startswith("`"):
        assert exists(row.ours.strip("`"))
    else:
        assert row.ours in ("not yet", "none")
        assert not exists(re.sub(r"^tf\.(distribute\.)?", "mpidist.", row.theirs.strip("`")))
        assert row.differs or row.ours == "not yet", "a name that will never be there needs a reason"


def test_names_are_those_of_tensorflow_wherever_they_are_there():
    """The porting rule: tf.distribute.X is mpidist.X."""
    for row in ROWS:
        if row.theirs.startswith("`tf.distribute.") and row.ours.startswith("`"):
            assert row.ours == row.theirs.replace("tf.distribute.", "mpidist.")
