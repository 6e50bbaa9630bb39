"""Each definition of a verb is a public name, or what moves its bytes: nothing else is called so, or passes it on."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import mpidist
from tests.helpers.parsed import parsed

PACKAGE = Path(mpidist.__file__).parent

#: Where each verb, and its form that is bound once, may be defined.
PLACES = {
    "all_reduce": {
        "collectives/communicator.py",  # the communicator
        "strategies/base.py",  # the replica context
        "world_collectives.py",  # all ranks, without a strategy
        "frameworks/torch/collectives.py",
        "frameworks/jax/gradients.py",
        "frameworks/autograd.py",
    },
    "all_reduce_init": {
        "collectives/communicator.py",
        "strategies/bound_collectives.py",  # the replica context and the strategy
        "world_collectives.py",
        "compression/replicas.py",
    },
    "all_gather": {
        "collectives/communicator.py",
        "strategies/base.py",
        "world_collectives.py",
        "frameworks/torch/collectives.py",
        "frameworks/jax/gradients.py",
        "frameworks/autograd.py",
    },
    "all_gather_init": {
        "collectives/communicator.py",
        "strategies/bound_collectives.py",
        "world_collectives.py",
    },
    "broadcast": {
        "collectives/communicator.py",
        "strategies/base.py",  # the strategy
        "strategies/replica_collectives.py",  # the replica context
        "world_collectives.py",
        "cross_device_ops.py",  # TensorFlow's, which users override
        "frameworks/torch/horovod_names.py",
    },
    "broadcast_init": {
        "collectives/communicator.py",
        "strategies/bound_collectives.py",
        "world_collectives.py",
    },
}


def definitions(files):
    """Return the files that define a function or method of each name, once for each definition."""
    found = defaultdict(list)
    for path, text in files.items():
        for node in ast.walk(parsed(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                found[node.name].append(path)
    return found


def test_a_verb_is_defined_where_users_call_it_and_once_there():
    found = definitions({str(path.relative_to(PACKAGE)): path.read_text() for path in PACKAGE.rglob("*.py")})
    assert {name: sorted(found[name]) for name in PLACES} == {name: sorted(places) for name, places in PLACES.items()}


def test_each_definition_is_found():
    text = "def broadcast(): ...\nclass A:\n    def broadcast(self): ...\n    def broadcasts(self): ..."
    assert definitions({"a.py": text, "b.py": "broadcast = 1"})["broadcast"] == ["a.py", "a.py"]
