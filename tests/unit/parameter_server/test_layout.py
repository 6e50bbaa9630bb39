"""Where variables and gradients lie: neighbours of one dtype without gaps, in the same order in both."""

from __future__ import annotations

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpidist.parameter_server.layout import Layout, PushPlan, VariableSpec, in_order

SHAPES = st.lists(st.integers(0, 3), max_size=3).map(tuple)


@st.composite
def specs(draw):
    some = draw(st.lists(st.tuples(SHAPES, st.sampled_from(["float32", "float64", "float16", "int32"])), max_size=8))
    shuffled = draw(st.permutations(range(len(some))))
    return [
        VariableSpec((number, 0), f"v{number}", shape, numpy.dtype(dtype))
        for number, (shape, dtype) in zip(shuffled, some, strict=True)
    ]


@given(specs())
def test_every_variable_has_elements_of_its_own_and_all_are_used(some):
    layout = Layout(some)
    memory = numpy.zeros(layout.nbytes, numpy.uint8)
    views = layout.views(memory)
    assert {key: (view.shape, view.dtype) for key, view in views.items()} == {
        each.key: (each.shape, each.dtype) for each in some
    }
    for view in views.values():
        raw = view.reshape(-1).view(numpy.uint8)
        raw += 1
    assert memory.max(initial=0) <= 1
    assert memory.sum() == sum(each.nbytes for each in some)
    assert all(section.start % 64 == 0 for section in layout.sections)


@given(specs(), st.data())
def test_spans_are_the_elements_of_some_variables_and_no_others(some, data):
    layout = Layout(some)
    chosen = data.draw(st.lists(st.sampled_from(range(len(some))), unique=True)) if some else []
    marked = numpy.zeros(layout.nbytes, numpy.uint8)
    for number, where in layout.spans(sorted(chosen)):
        layout.sections[number].of(marked)[where].view(numpy.uint8)[...] = 1
    for index, each in enumerate(layout.specs):
        raw = layout.views(marked)[each.key].reshape(-1).view(numpy.uint8)
        assert (raw == (index in chosen)).all()


def test_neighbours_are_one_span():
    layout = Layout(VariableSpec((number, 0), "v", (5,), numpy.dtype("float32")) for number in range(6))
    assert list(layout.spans([1, 2, 3, 5])) == [(0, slice(5, 20)), (0, slice(25, 30))]


@given(specs(), st.sampled_from([None, "float16"]))
def test_a_push_lies_in_the_order_of_the_layout(some, narrow):
    floats = [each for each in some if each.dtype.kind == "f"]
    plan = PushPlan(tuple(in_order(floats)), push_dtype=None if narrow is None else numpy.dtype(narrow))
    assert list(plan.dense) == Layout(floats).specs
    marked = numpy.zeros(plan.nbytes(), numpy.uint8)
    for each, (number, first) in zip(plan.dense, plan.places, strict=True):
        section = plan.sections[number]
        assert section.dtype == plan.wire_dtype(each)
        section.of(marked)[first : first + each.size].view(numpy.uint8)[...] += 1
    assert marked.max(initial=0) <= 1
    assert marked.sum() == sum(each.size * plan.wire_dtype(each).itemsize for each in floats)


def test_wide_gradients_are_sent_narrow_and_narrow_ones_as_they_are():
    dtypes = {name: VariableSpec((0, 0), name, (2,), numpy.dtype(name)) for name in ("float16", "float32", "float64")}
    plan = PushPlan((), push_dtype=numpy.dtype("float16"))
    assert {name: plan.wire_dtype(each).name for name, each in dtypes.items()} == dict.fromkeys(dtypes, "float16")
    assert {name: PushPlan(()).wire_dtype(each).name for name, each in dtypes.items()} == {
        name: name for name in dtypes
    }


@given(st.lists(st.integers(0, 4), min_size=1, max_size=3))
def test_rows_lie_behind_whole_gradients_and_do_not_overlap(counts):
    dense = VariableSpec((0, 0), "dense", (3,), numpy.dtype("float32"))
    tables = tuple(
        VariableSpec((number + 1, 0), "table", (9, 2), numpy.dtype("float64")) for number in range(len(counts))
    )
    plan = PushPlan((dense,), tables)
    marked = numpy.zeros(plan.nbytes(counts), numpy.uint8)
    plan.sections[0].of(marked).view(numpy.uint8)[...] += 1
    for (numbers, rows), count in zip(plan.row_places(counts), counts, strict=True):
        assert marked[numbers].size == 8 * count and marked[rows].size == 16 * count
        assert numbers.start % 8 == rows.start % 64 == 0
        marked[numbers] += 1
        marked[rows] += 1
    assert marked.max() == 1


@given(specs())
def test_a_description_says_it_all(some):
    assert [VariableSpec.from_description(each.described()) for each in some] == some


def test_a_description_knows_bfloat16():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    each = VariableSpec((3, 1), "v", (2,), numpy.dtype(ml_dtypes.bfloat16))
    assert VariableSpec.from_description(each.described()) == each
