"""Cards: which ranks have the same GPU, and what is said of it."""

from __future__ import annotations

import json
import types
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpidist.device import cards as cards_module
from mpidist.device.cards import (
    Card,
    card_of,
    card_table,
    card_text,
    current_card,
    dotted_nccl,
    exchange_cards,
    idle_hint,
    place_of,
    places_without_choice,
    shared_cards,
    sharing_problem,
    take_card,
)
from mpidist.errors import DeviceError
from mpidist.testing import run_ranks
from mpidist.world import world_communicator


def card(machine: str = "a", bus_id: str = "0000:01:00.0", index: int = 0) -> Card:
    return Card(machine, bus_id, index, "H100")


class Library:
    """CuPy, as far as it is asked, on a machine with some GPUs; it notes what is made the current device."""

    def __init__(self, bus_ids: list[str], busy: int | None = None) -> None:
        self.taken: list[int] = []
        outer = self

        class Device:
            def __init__(self, index: int) -> None:
                self.index, self.pci_bus_id = index, bus_ids[index]

            def use(self) -> None:
                if self.index == busy:
                    raise RuntimeError("cudaErrorDevicesUnavailable: CUDA-capable device(s) is/are busy")
                outer.taken.append(self.index)

        def properties(index: int) -> dict[str, object]:
            return {"name": f"card {index}".encode()}

        runtime = types.SimpleNamespace(
            getDeviceProperties=properties,
            getDevice=lambda: outer.taken[-1] if outer.taken else 0,
            getDeviceCount=lambda: len(bus_ids),
        )
        self.cuda = types.SimpleNamespace(Device=Device, runtime=runtime)


# -- one rank's card ---------------------------------------------------------------------------------------------------


def test_a_card_is_taken_and_described():
    library = Library(["0000:0a:00.0", "0000:0b:00.0"])
    found = take_card(library, 1)
    assert (found.bus_id, found.index, found.name) == ("0000:0B:00.0", 1, "card 1")
    assert library.taken == [1]
    assert current_card(library) == found
    assert card_of(library, 0) != found and library.taken == [1]
    assert str(found) == "card 1 0000:0B:00.0"


def test_all_processes_of_a_machine_name_it_alike():
    library = Library(["0000:0a:00.0"])
    assert card_of(library, 0).machine == card_of(library, 0).machine != ""


# -- who shares --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cards", "shared"),
    [
        ([], ()),
        ([None, None], ()),
        ([card()], ()),
        ([card(), card()], ((0, 1),)),
        ([card(), card("b")], ()),  # the same place in two machines
        ([card(bus_id="1"), card(bus_id="2")], ()),
        ([card(index=0), card(index=1)], ((0, 1),)),  # each numbers what it sees
        ([card(), None, card()], ((0, 2),)),
        ([card("a"), card("b"), card("b"), card("a"), card("b")], ((0, 3), (1, 2, 4))),
    ],
)
def test_ranks_with_the_same_card(cards, shared):
    assert shared_cards(cards) == shared


@given(st.lists(st.none() | st.builds(card, st.sampled_from("ab"), st.sampled_from("123"), st.integers(0, 3))))
def test_a_rank_shares_its_card_when_it_is_counted_twice(cards):
    count = Counter((each.machine, each.bus_id) for each in cards if each is not None)
    sharing = [rank for ranks in shared_cards(cards) for rank in ranks]
    expected = [rank for rank, each in enumerate(cards) if each and count[each.machine, each.bus_id] > 1]
    assert sorted(sharing) == expected
    assert all(len({(cards[rank].machine, cards[rank].bus_id) for rank in ranks}) == 1 for ranks in shared_cards(cards))


def places(*bus_ids: str, machine: str = "a") -> list[str]:
    return [card(machine, bus_id).place for bus_id in bus_ids]


@pytest.mark.parametrize(
    ("cards", "seen", "told"),
    [
        ([card(bus_id="1"), card(bus_id="1")], [places("1", "2", "3")] * 2, ("0, 1", "2 of the 3", "% 3")),
        (
            [card("b"), None, card("a", "1"), card("a", "1")],
            [[], [], [], places("1", "2")],
            ("2, 3", "1 of the 2", "% 2"),
        ),
        ([card(bus_id="1"), card(bus_id="1")], [places("1")] * 2, None),  # as the launcher or the user has said
        ([card(bus_id="1"), card(bus_id="1")], [[], []], None),  # somebody has chosen
        ([card(bus_id="1"), card(bus_id="2")], [places("1", "2", "3")] * 2, None),  # nobody shares
        ([card(bus_id="1"), card(bus_id="2"), card(bus_id="1")], [places("1", "2")] * 3, None),  # none is idle
        ([card("a", "1"), card("b", "1")], [places("1", "2"), places("1", "2", machine="b")], None),
        ([], [], None),
    ],
)
def test_ranks_of_one_card_are_told_of_those_that_no_rank_has(cards, seen, told):
    hint = idle_hint(cards, seen)
    if told is None:
        assert hint == ""
    else:
        ranks, idle, turns = told
        assert hint.startswith(f"ranks {ranks} have one GPU, H100 1, and no rank has {idle} that they see")
        assert f"cupy.cuda.Device(mpidist.local_rank() {turns}).use()" in hint and "Make a strategy" in hint


@pytest.mark.parametrize(
    ("takes", "uses", "count"), [([], [], 2), ([0], [], 0), ([1], [], 0), ([], [1], 0), ([1], [0], 2)]
)
def test_a_process_without_a_choice_is_on_the_first_gpu_that_nobody_took(takes, uses, count, monkeypatch):
    """The last: what was taken is another one, as in a thread of the user's, which begins on the first."""
    monkeypatch.setattr(cards_module, "_taken", set())
    library = Library(bus_ids := ["0000:0a:00.0", "0000:0b:00.0"])
    for index in takes:
        take_card(library, index)
    library.taken += uses
    assert places_without_choice(library) == [place_of(library, index) for index in range(len(bus_ids))][:count]
    assert card_of(library, 1).place == place_of(library, 1)


@pytest.mark.parametrize(
    ("version", "environ", "problem"),
    [
        (23203, {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}, ""),
        (23000, {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}, ""),
        (22907, {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}, "NCCL is 2.29.7, and 2.30 or newer can do it"),
        (23203, {}, "NCCL_MULTI_RANK_GPU_ENABLE=1 is not set"),
        (23203, {"NCCL_MULTI_RANK_GPU_ENABLE": "0"}, "NCCL_MULTI_RANK_GPU_ENABLE=1 is not set"),
    ],
)
def test_when_nccl_lets_ranks_share_a_card(version, environ, problem):
    assert sharing_problem(version, environ) == problem


@pytest.mark.parametrize(("number", "text"), [(22304, "2.23.4"), (21903, "2.19.3"), (23203, "2.32.3")])
def test_nccl_versions_as_people_write_them(number, text):
    assert dotted_nccl(number) == text


# -- all ranks' cards --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_rank_learns_of_all_cards(size):
    cards = [card("a", str(rank // 2)) if rank != 1 else None for rank in range(size)]

    def on_rank():
        communicator = world_communicator()
        return exchange_cards(cards[communicator.rank], "", communicator.exchange)

    assert run_ranks(size, on_rank) == [tuple(cards)] * size


def test_all_ranks_raise_what_is_wrong_on_some():
    def on_rank():
        communicator = world_communicator()
        problem = f"GPU {communicator.rank} cannot be used" if communicator.rank else ""
        with pytest.raises(DeviceError) as caught:
            exchange_cards(None, problem, communicator.exchange, "task {}".format)
        return str(caught.value)

    expected = "task 1: GPU 1 cannot be used; task 2: GPU 2 cannot be used"
    assert run_ranks(3, on_rank) == [expected] * 3


def test_what_is_exchanged_is_short():
    sent = []
    exchange_cards(card(), "", lambda raw: sent.append(raw) or [raw])
    assert len(sent[0]) < 200 and json.loads(sent[0])[1]["bus_id"] == "0000:01:00.0"


# -- as text -----------------------------------------------------------------------------------------------------------


def test_the_table_has_a_line_for_each_rank():
    cards = [card(bus_id="01"), card(bus_id="01"), None, card(bus_id="02", index=1), card(bus_id="01")]
    assert card_table(cards, ["n9", "n9", "n9", "n10", "n9"]).splitlines() == [
        "GPUs of the ranks:",
        "  rank 0  n9   GPU:0   H100  01  shared with ranks 1, 4",
        "  rank 1  n9   GPU:0   H100  01  shared with ranks 0, 4",
        "  rank 2  n9   no GPU",
        "  rank 3  n10  GPU:1   H100  02",
        "  rank 4  n9   GPU:0   H100  01  shared with ranks 0, 1",
    ]
    assert card_table([card(bus_id="01"), None], ["n9", "n9"], {1: "a server"}).splitlines() == [
        "GPUs of the ranks:",
        "  rank 0  n9  GPU:0   H100  01",
        "  rank 1  n9  no GPU            a server",
    ]


def test_the_text_of_one_rank():
    assert card_text(0, ()) == card_text(1, [card(), None]) == ""
    assert card_text(0, [card(), None]) == "H100 0000:01:00.0"
    assert card_text(1, [card(), card()]) == "H100 0000:01:00.0, shared with rank 0"
