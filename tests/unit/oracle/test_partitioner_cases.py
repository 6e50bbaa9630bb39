"""TensorFlow's observed cases of partitioners."""

from __future__ import annotations

import pytest

from mpidist.experimental import partitioners
from tests.oracle.cases import cases

CASES = cases("partitioner")
OF_KIND = {
    "fixed": partitioners.FixedShardsPartitioner,
    "min": partitioners.MinSizePartitioner,
    "max": partitioners.MaxSizePartitioner,
}
COMPUTED = {name: case for name, case in CASES.items() if isinstance(case["expected"], list) and "axis_too" not in name}
RAISED = {
    "min_bad_bytes": lambda: partitioners.MinSizePartitioner(min_shard_bytes=0),
    "min_bad_shards": lambda: partitioners.MinSizePartitioner(max_shards=0),
    "max_bad_bytes": lambda: partitioners.MaxSizePartitioner(max_shard_bytes=0),
    "max_bad_shards": lambda: partitioners.MaxSizePartitioner(8, max_shards=-1),
    "partitioner_base": lambda: partitioners.Partitioner()((4,), "float32"),
    "min_axis_too_big": lambda: partitioners.MinSizePartitioner()((3, 3), "float32", axis=2),
}
EXCEPTIONS = {"ValueError": ValueError, "NotImplementedError": NotImplementedError}


@pytest.mark.parametrize("name", COMPUTED)
def test_as_tensorflow(name):
    asked = dict(COMPUTED[name]["input"])
    shape, dtype, axis = asked.pop("shape"), asked.pop("dtype", "float32"), asked.pop("axis", 0)
    if name == "max_zero_shards":
        asked = {"max_shard_bytes": 4, "max_shards": 0}
    partitioner = OF_KIND[name.partition("_")[0]](**asked)
    assert partitioner(shape, dtype, axis) == COMPUTED[name]["expected"]


@pytest.mark.parametrize("name", RAISED)
def test_raises_as_tensorflow(name):
    expected = CASES[name]["expected"]
    with pytest.raises(EXCEPTIONS[expected["raises"]]) as raised:
        RAISED[name]()
    assert expected["message"] in str(raised.value)


def test_every_case_is_tested():
    assert {*COMPUTED, *RAISED} == set(CASES)
