"""Every topic of semantics and training has a module that proves that each of its cases is tested or in deviations."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.oracle.cases import cases
from tests.oracle.deviations import DEVIATIONS

TOPICS = (
    "context reduce gather variables batch_split autoshard loss optimizer keras_fit multi_worker preemption "
    "partitioner parameter_server estimator"
).split()
TESTS = {path: path.read_text() for path in Path(__file__).parents[1].rglob("test_*.py")}


@pytest.mark.parametrize("topic", TOPICS)
def test_a_module_compares_all_of_the_topic_with_what_it_tests(topic):
    name = re.compile(rf'^CASES = cases\("{topic}"\)$', re.MULTILINE)
    proof = re.compile(r"assert .*(CASES\.keys\(\) ==|== set\(CASES\)|set\(CASES\) ==|CASES\.values\(\)\} == set)")
    assert cases(topic)
    assert [path.name for path, text in TESTS.items() if name.search(text) and proof.search(text)]


def test_none_is_left_for_later():
    assert not [path.name for path, text in TESTS.items() if path.name != Path(__file__).name and "LATER" in text]


def test_deviations_are_cases():
    topics = [*TOPICS, "tf_config", "slurm"]
    assert DEVIATIONS.keys() <= {name for topic in topics for name in cases(topic)}
