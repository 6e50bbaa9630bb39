"""Copies that a server writes and clients read: never the same at the same time."""

from __future__ import annotations

import mmap
import os

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpidist.parameter_server.copies import Buffers, NoCopy, OwnSlotCopies, Reader, SlotCopies, Variables
from mpidist.parameter_server.copies import mapped as mapping
from mpidist.parameter_server.layout import Layout, VariableSpec
from mpidist.parameter_server.ledger import Ledger
from mpidist.runtime import shared_memory


def layout_of(count: int) -> Layout:
    return Layout(VariableSpec((number, 0), f"v{number}", (3,), numpy.dtype("float64")) for number in range(count))


def published(variables: int, clients: int) -> tuple[Buffers, list[Reader]]:
    buffers = Buffers(layout_of(variables), clients)
    return buffers, [Reader(buffers.layout, buffers.path, buffers.token, clients, client) for client in range(clients)]


def versions_of(copies: Variables) -> list[int]:
    """Return the versions of all variables in the current copy."""
    return copies.versions[copies.current].tolist()


def write(writer: Variables, changed: list[int], value: float) -> bool:
    """Change some variables; return False, and change nothing, if the server has to do it."""
    where = writer.layout.places_of([(index, 0) for index in changed])
    buffer = writer.begin(where)
    if buffer < 0:
        return False
    for index in changed:
        writer.views(buffer)[index, 0][...] = value
    writer.commit(buffer, where)
    return True


def test_what_was_read_without_a_pin_is_known_to_be_whole_or_not():
    buffers, (reader,) = published(2, 1)
    stamps = [buffers.stamp()]
    assert buffers.is_as(stamps[0])
    buffers.begin(slice(0, 1))
    assert buffers.is_as(stamps[0])  # another copy is written
    for number in range(4):  # the copies take turns
        assert write(buffers, [number % 2], number)
        assert [buffers.is_as(stamp) for stamp in stamps] == [False] * len(stamps)
        stamps.append(buffers.stamp())
        assert reader.is_as(stamps[-1])


class Killed(Exception):
    """In place of the end of a process."""


class Mortal:
    """Words of somebody who dies before he writes one of them."""

    def __init__(self, words, stores):
        self.words, self.left = words, stores

    def __getitem__(self, where):
        return self.words[where]

    def __setitem__(self, where, value):
        if not self.left:
            raise Killed
        self.left -= 1
        self.words[where] = value


def write_and_die(writer: Variables, changed: list[int], value: float, stores: int) -> bool:
    """Do as `write`, but for what comes after so many stores to words."""
    words = writer._words
    writer._words = Mortal(words, stores)
    try:
        return write(writer, changed, value)
    except Killed:
        return False
    finally:
        writer._words = words


#: Who writes, the server or client 0 to 2, what, and after how many stores he dies.
CHANGES = st.tuples(st.integers(-1, 2), st.sets(st.integers(0, 2), min_size=1), st.integers(0, 9))
ACTIONS = st.one_of(
    st.tuples(st.just("write"), CHANGES),
    st.tuples(st.just("death"), CHANGES),
    st.tuples(st.just("pin"), st.integers(0, 2)),
    st.tuples(st.just("unpin"), st.integers(0, 2)),
)


@settings(deadline=None)
@given(st.lists(ACTIONS, max_size=40))
def test_a_pinned_copy_never_changes_and_the_current_one_is_up_to_date(actions):
    buffers, readers = published(3, 3)
    model, versions = [0.0] * 3, [0] * 3
    held = {}
    for number, (verb, what) in enumerate(actions, start=1):
        if verb in ("write", "death"):
            who, which, stores = what
            changed, writer, before = sorted(which), buffers if who < 0 else readers[who], buffers.current
            if verb == "death":
                write_and_die(writer, changed, number, stores)
            elif not write(writer, changed, number):
                write(buffers, changed, number)
            if buffers.current != before:
                for index in changed:
                    model[index], versions[index] = number, versions[index] + 1
            assert verb == "death" or buffers.current != before
        elif verb == "pin":
            buffer = readers[what].pin()
            held[what] = buffer, list(model), list(versions)
        else:
            readers[what].unpin()
            held.pop(what, None)
        for client, (buffer, values, seen) in held.items():
            views = readers[client].shown(buffer)
            assert [views[index, 0].tolist() for index in range(3)] == [[value] * 3 for value in values]
            assert readers[client].versions[buffer].tolist() == seen
    buffers.close()


def step(writer: Variables, slots: SlotCopies, number: int, changed: list[int], value: float, stores: int) -> None:
    """Write some variables and their slots of one optimizer; die after so many stores to words."""
    where, kept = (
        writer.layout.places_of([(index, 0) for index in changed]),
        (writer._words, slots._words, writer._sides),
    )
    ticking = Mortal(kept[0], stores)
    writer._words = ticking
    slots._words, writer._sides = (Beside(words, ticking) for words in kept[1:])
    try:
        copy = writer.begin(where)
        old = writer.side(number)
        slots.prepare(old, 1 - old, where)
        for index in changed:
            writer.views(copy)[index, 0][...] = value
            for slot, array in slots.of((index, 0), 1 - old).items():
                array[...] = value * len(slot)
        ticking[-1] = ticking[-1]  # a moment to die
        slots.count_change(old, 1 - old, where)
        writer.commit(copy, where, 1 << number)
        slots.finish(1 - old)
    finally:
        writer._words, slots._words, writer._sides = kept


class Beside(Mortal):
    """Other words of somebody mortal."""

    def __init__(self, words, ticking):
        self.words, self._ticking = words, ticking

    @property
    def left(self):
        return self._ticking.left

    @left.setter
    def left(self, value):
        self._ticking.left = value


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 1), st.sets(st.integers(0, 2), min_size=1), st.integers(0, 16)), max_size=30))
def test_slots_are_of_the_same_step_as_variables_wherever_a_writer_dies(steps):
    """Two optimizers, three variables; each step may end at any of its stores."""
    take_steps(steps)


@pytest.mark.parametrize("stores", range(17))
def test_nothing_of_a_side_that_was_begun_is_believed(stores):
    """The writer dies with a side that was up to date before, and the next ones change something else."""
    take_steps([(0, {0}, 99), (0, {1}, 99), (0, {0}, stores), (0, {1}, 99), (0, {2}, 99), (1, {1}, 99), (0, {1}, 99)])


def take_steps(steps):
    """Make steps, each of an optimizer, for some variables, up to so many stores; check all after each."""
    buffers, _ = published(3, 1)
    names = ("m", "vv")
    own = [OwnSlotCopies(buffers.layout, names, 2, {"vv": 0.5}, shares=True) for _ in range(2)]
    assert all(slots.admit([(index, 0) for index in range(3)]) for slots in own)
    mapped = [SlotCopies(buffers.layout, names, 2, mapping(slots.path, slots.token)) for slots in own]
    values, kept = [0.0] * 3, [{index: [0.0, 0.5] for index in range(3)} for _ in range(2)]
    for value, (number, changed, stores) in enumerate(steps, start=1):
        before = buffers.current
        try:
            step(buffers, mapped[number], number, sorted(changed), value, stores)
        except Killed:
            pass
        if buffers.current != before:
            for index in changed:
                values[index], kept[number][index] = value, [value, 2.0 * value]
        views = buffers.views(buffers.current)
        assert [views[index, 0].tolist() for index in range(3)] == [[each] * 3 for each in values]
        for optimizer, slots in enumerate(own):
            for index in range(3):
                found = slots.of((index, 0), buffers.side(optimizer))
                assert [array.tolist() for array in found.values()] == [[each] * 3 for each in kept[optimizer][index]]
    for each in (buffers, *own):
        each.close()


def test_slots_have_memory_for_those_variables_that_have_some():
    layout = Layout(VariableSpec((number, 0), f"v{number}", (1 << 12,), numpy.dtype("float32")) for number in range(4))
    slots = OwnSlotCopies(layout, ("m", "v"), 2, {}, shares=True)
    words = os.stat(slots.path).st_blocks * 512
    for count, keys in enumerate([[(2, 0)], [(2, 0), (0, 0)]], start=1):
        assert slots.admit(keys)
        assert os.stat(slots.path).st_blocks * 512 <= words + 2 * 2 * count * ((1 << 14) + mmap.PAGESIZE)
    assert slots.keys == [(0, 0), (2, 0)]
    slots.close()


def test_nothing_of_a_copy_that_was_begun_and_not_committed_is_taken_for_written():
    buffers, (reader,) = published(2, 1)
    for value in (1.0, 2.0, 3.0):  # so that there are other copies with versions of their own
        write(buffers, [0], value)
        write(buffers, [1], value)
    for again in range(3):
        buffer = buffers.begin(numpy.array([0]))
        buffers.views(buffer)[0, 0][...] = 99.0
        write(buffers, [1], 4.0 + again)
        views = reader.shown(pinned := reader.pin())
        assert (views[0, 0].tolist(), views[1, 0].tolist()) == ([3.0] * 3, [4.0 + again] * 3)
        assert reader.versions[pinned].tolist() == [3, 4 + again]
    buffers.close()


def test_a_copy_that_has_become_current_is_not_given_up_though_its_writer_died_at_once():
    buffers, (reader,) = published(1, 1)
    write(buffers, [0], 1.0)
    stores = next(n for n in range(20) if not write_and_die(reader, [0], 2.0, n) and versions_of(buffers) == [2])
    assert not buffers._words[buffers._places.whole + buffers.current], stores
    write(buffers, [0], 3.0)
    assert (buffers.views(buffers.current)[0, 0].tolist(), versions_of(buffers)) == ([3.0] * 3, [3])
    buffers.close()


def test_who_changes_the_same_again_and_again_copies_nothing_else(monkeypatch):
    buffers, (reader, *_) = published(3, 2)
    copied, spans = [], Layout.spans
    monkeypatch.setattr(Layout, "spans", lambda self, places: copied.append(places) or spans(self, places))
    for value in range(10):
        write(buffers, [1, 2], value)
        reader.pin()
    assert 0 < len(copied) <= 3  # into each copy once
    write(buffers, [0], 99)
    assert versions_of(buffers) == [1, 10, 10]
    assert [buffers.views(buffers.current)[index, 0][0] for index in range(3)] == [99, 9, 9]
    buffers.close()


def test_a_client_leaves_a_change_to_the_server_while_no_copy_has_memory():
    buffers, (reader,) = published(1, 1)
    reader.pin()
    assert write(reader, [0], 1.0)
    assert not write(reader, [0], 2.0)  # one is pinned, one current, and the third has no memory yet
    assert write(buffers, [0], 2.0)
    assert write(reader, [0], 3.0)
    assert buffers.views(buffers.current)[0, 0].tolist() == [3.0] * 3
    buffers.close()


@given(steps=st.lists(st.tuples(st.integers(0, 8), st.booleans()), max_size=60))
@settings(max_examples=50, deadline=None)
def test_with_every_client_admitted_there_is_always_a_copy_to_be_written(steps):
    buffers, readers = published(1, 9)
    assert all(buffers.admit(client) for client in range(9))
    used = os.stat(buffers.path).st_blocks
    for value, (client, pins) in enumerate(steps):
        assert write(readers[client], [0], value)  # a client, which cannot have memory for more
        if pins:
            readers[client].pin()
    assert os.stat(buffers.path).st_blocks == used
    buffers.close()


def test_a_writer_is_told_when_there_is_no_memory_for_another_copy(monkeypatch):
    buffers, (reader,) = published(1, 1)
    monkeypatch.setattr(shared_memory, "room_bytes", lambda: 0)
    assert not buffers.admit(0)
    held = [reader.shown(reader.pin())[0, 0][1:]]  # a view of a view
    assert write(buffers, [0], 1.0)
    for _ in range(2):
        reader.let_go()
        with pytest.raises(NoCopy):
            write(buffers, [0], 2.0)
    held.clear()
    reader.let_go()
    assert write(buffers, [0], 2.0)
    assert reader.shown(reader.pin())[0, 0].tolist() == [2.0] * 3
    buffers.close()


def test_what_a_lost_client_had_pinned_is_free(monkeypatch):
    buffers, (reader,) = published(1, 1)
    monkeypatch.setattr(shared_memory, "room_bytes", lambda: 0)
    reader.pin()
    assert write(buffers, [0], 1.0)
    buffers.forget(0)
    assert write(buffers, [0], 2.0)
    buffers.close()


def test_what_clients_see_cannot_be_written():
    buffers, (reader,) = published(1, 1)
    view = reader.shown(reader.pin())[0, 0]
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 1
    buffers.close()


def test_memory_of_another_layout_is_not_taken_for_this_one():
    buffers, _ = published(1, 1)
    with pytest.raises(FileNotFoundError, match="any more"):
        Reader(buffers.layout, buffers.path, buffers.token + 1, 1, 0)
    with pytest.raises(FileNotFoundError, match="any more"):
        Reader(layout_of(10_000), buffers.path, buffers.token, 1, 0)
    buffers.close()


def test_without_clients_there_is_one_copy_in_private_memory():
    buffers, _ = published(2, 0)
    for value in (1.0, 2.0):
        write(buffers, [0], value)
    assert (buffers.count, buffers.path, buffers.current) == (1, "", 0)
    assert buffers.views(0)[0, 0].tolist() == [2.0] * 3
    assert versions_of(buffers) == [2, 0]


def test_copies_that_nobody_needs_cost_nothing():
    buffers, (reader, *_) = published(1, 8)
    for value in range(20):
        write(buffers, [0], value)
        reader.pin()
    assert os.stat(buffers.path).st_blocks * 512 <= 5 * mmap.PAGESIZE  # words, and at most three copies
    buffers.close()


def test_the_words_of_a_ledger_do_not_overlap():
    words = [Ledger.LAYOUT, Ledger.RULES, Ledger.TORN, Ledger.HELD, Ledger.PUSHES, Ledger.RATES]
    words += [word(number) for number in range(64) for word in (Ledger.steps_word, Ledger.rate_real)]
    words += [Ledger.applied_word(client) + offset for client in range(5) for offset in (0, 1)]
    assert len(set(words)) == len(words)
    assert max(words) < len(Ledger(bytearray(Ledger.nbytes(5)), 5).words)
