"""The measured choice on real ranks: what rank 0 has is what all take, and sums are right whatever it is."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy
import pytest

from mpidist import transports
from mpidist.collectives.communicator import Communicator
from mpidist.collectives.engine import Engine
from mpidist.collectives.ways import selection
from mpidist.schedules.cost import CostModel
from mpidist.schedules.figures import Figures
from mpidist.tuning import store
from mpidist.tuning.calibration import calibrate
from mpidist.tuning.store import Record, key_of, load_choices

pytestmark = pytest.mark.mpi(min_size=2)

LONG, SHORT = 1 << 17, 10


@pytest.fixture
def launch(tmp_path, monkeypatch):
    """Give communicators that have loaded nothing yet, as at the beginning of a launch, with a store of their own."""
    world = transports.world()
    folder = Communicator(world).exchange(str(tmp_path).encode())[0].decode()
    chosen = replace(world.control.settings, tuning_folder=folder, deterministic=False)
    monkeypatch.setattr(world.control, "settings", replace(chosen, algorithm="auto"))

    def begin():
        communicator = Communicator(world)
        communicator.load_choices = partial(load_choices, communicator)
        return communicator

    return begin


def agreed(communicator, value):
    """Return whether all ranks have the same value."""
    return len(set(communicator.exchange(repr(value).encode()))) == 1


def keep(communicator, quickest):
    """Keep figures, on rank 0 alone, by which `quickest` takes a tenth of what others do."""
    names = selection.eligible(communicator.facts())
    points = {name: ((4.0, 1e-3 if name == quickest else 1e-2),) for name in names}
    figures = Figures(CostModel.flat(1e-6, 1e-9), points)
    if communicator.rank == 0:
        where = store.folder(communicator.control.settings)
        store.write(Record(key_of(communicator), communicator.topology.hosts, figures), where)
    communicator.barrier()


def sums(communicator, count, algorithm=None):
    """Reduce, in place and as a list, and return whether all ranks have the sum."""
    size, rank = communicator.size, communicator.rank
    expected = ((numpy.arange(count) % 7) * size + size * (size - 1) // 2).astype("f4")
    values = (numpy.arange(count) % 7 + rank).astype("f4")
    (fused,) = Engine(communicator, algorithm=algorithm)([values])
    communicator.all_reduce(values, algorithm=algorithm)
    right = numpy.array_equal(values, expected) and numpy.array_equal(fused, expected)
    return communicator.exchange(b"1" if right else b"0") == [b"1"] * size


def test_a_calibration_gives_all_ranks_the_same_figures(launch):
    communicator = launch()
    figures = calibrate(communicator, budget_seconds=0.1, largest_bytes=1 << 16, turns=1)
    names = selection.eligible(communicator.facts())
    complete = set(figures.points) == set(names) and all(points for points in figures.points.values())
    assert communicator.exchange(b"1" if complete else b"0") == [b"1"] * communicator.size
    assert agreed(communicator, figures)
    assert agreed(communicator, selection.worked_out(figures, communicator.facts()))


def test_where_nothing_is_stored_nothing_is_measured(launch):
    communicator = launch()
    assert sums(communicator, SHORT) and sums(communicator, LONG)
    assert communicator.facts().choices is None
    folder = store.folder(communicator.control.settings)
    assert communicator.exchange(b"1" if list(folder.iterdir()) == [] else b"0")[0] == b"1"


def test_what_is_stored_on_rank_0_is_what_all_take(launch):
    for name in selection.eligible(launch().facts()):
        communicator = launch()
        keep(communicator, name)
        for count in (LONG, LONG + 1, SHORT, 1 << 20):
            assert sums(communicator, count), (name, count)
        assert communicator.way(4 * LONG, None).algorithm == name


def test_an_explicit_choice_wins(launch):
    communicator = launch()
    keep(communicator, "recursive_doubling")
    for algorithm in ("ring", "native", "pinned", *selection.eligible(communicator.facts())):
        assert sums(communicator, LONG, algorithm), algorithm
    fixed = selection.pinned(4 * LONG, communicator.facts())
    assert communicator.way(4 * LONG, "ring").algorithm == "ring"
    assert communicator.way(4 * LONG, "pinned").algorithm == fixed


def test_a_deterministic_launch_does_not_look(launch, monkeypatch):
    keep(launch(), "recursive_doubling")
    control = transports.world().control
    monkeypatch.setattr(control, "settings", replace(control.settings, deterministic=True))
    communicator = launch()
    communicator.load_choices = lambda watch: pytest.fail("it looked")
    bits = []
    for _ in range(2):
        values = numpy.random.default_rng(communicator.rank).normal(size=LONG).astype("f4")
        communicator.all_reduce(values)
        bits.append(values.tobytes())
    assert communicator.exchange(b"1" if bits[0] == bits[1] else b"0") == [b"1"] * communicator.size
    assert agreed(communicator, bits)
    assert communicator.way(4 * LONG, None).algorithm == selection.pinned(4 * LONG, communicator.facts())
