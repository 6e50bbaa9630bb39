"""The GPU of a rank becomes CuPy's current device where a strategy is made, and all ranks know who has which."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from mpidist import arrays
from mpidist.collectives.communicator import Communicator
from mpidist.errors import DeviceError
from mpidist.strategies import devices_of_ranks
from mpidist.strategies.devices_of_ranks import gpus_of_ranks, take_device
from mpidist.strategies.mirrored import MirroredStrategy
from mpidist.strategies.one_device import OneDeviceStrategy
from mpidist.testing import run_ranks
from mpidist.transports import alone, world
from tests.unit.device.test_cards import Library

GPU = "/job:worker/replica:0/task:0/device:GPU:{}".format
CPU = "/job:worker/replica:0/task:0/device:CPU:0"


@pytest.fixture
def two_gpus(monkeypatch):
    """Two GPUs can be seen."""
    gpus = [arrays.PhysicalDevice(f"/physical_device:GPU:{index}", "GPU") for index in range(2)]
    monkeypatch.setattr(arrays, "list_physical_devices", lambda device_type=None: gpus)
    return ["0000:0a:00.0", "0000:0b:00.0"]


def communicator(has_gpus: bool) -> Communicator:
    return Communicator(replace(world(), has_gpus=has_gpus))


def test_ranks_take_their_gpus_and_know_who_shares_them(two_gpus, caplog):
    caplog.set_level(logging.INFO, logger="mpidist")

    def on_rank():
        own, library = communicator(True), Library(two_gpus)
        cards = take_device(GPU(own.rank % 2), own, library)
        return library.taken, [card.bus_id for card in cards], own.control.call

    bus_ids = ["0000:0A:00.0", "0000:0B:00.0", "0000:0A:00.0"]
    assert run_ranks(3, on_rank) == [([rank % 2], bus_ids, 1) for rank in range(3)]
    (line,) = [record.getMessage() for record in caplog.records if record.name == "mpidist"]
    assert line.startswith("GPUs of the ranks:") and line.count("shared with") == 2


SETS = [["0000:0a:00.0", "0000:0b:00.0"], ["0000:0c:00.0", "0000:0d:00.0"]]


@pytest.mark.parametrize(("sets", "taken"), [([0, 0, 1, 1], (0, 1, 0, 1)), ([0, 1, 0, 1], (0, 0, 1, 1))])
def test_ranks_that_see_other_gpus_take_one_each(two_gpus, sets, taken):
    def on_rank():
        own = communicator(True)
        found = gpus_of_ranks(own, Library(SETS[sets[own.rank]]))
        assert gpus_of_ranks(own, None) == found  # and asks nobody again
        return found, own.control.call

    assert run_ranks(4, on_rank) == [(taken, 1)] * 4


def test_a_rank_that_wants_no_gpu_leaves_it_to_the_others(two_gpus):
    def on_rank():
        own = communicator(True)
        return gpus_of_ranks(own, Library(two_gpus), takes_one=own.rank != 0)

    assert run_ranks(3, on_rank) == [(None, 0, 1)] * 3


def test_gpus_whose_place_cuda_does_not_tell_are_taken_so_that_the_error_comes_from_there(two_gpus):
    def on_rank():
        own, library = communicator(True), Library(two_gpus)
        if own.rank:
            library.cuda.Device = lambda index: exec("raise RuntimeError('cudaErrorUnknown')")
        return gpus_of_ranks(own, library)

    assert run_ranks(2, on_rank) == [(0, 0)] * 2


def test_a_rank_that_cannot_use_its_gpu_is_an_error_on_all(two_gpus):
    def on_rank():
        own = communicator(True)
        with pytest.raises(DeviceError, match="^rank 1.*GPU 1 cannot be used: cudaErrorDevicesUnavail.*nvidia-smi"):
            take_device(GPU(own.rank), own, Library(two_gpus, busy=1))

    run_ranks(2, on_rank)


def test_ranks_without_gpus_exchange_nothing(two_gpus):
    def on_rank():
        own, library = communicator(False), Library(two_gpus)
        assert take_device(CPU, own, library) == ()
        assert library.taken == []
        return own.control.call

    assert run_ranks(2, on_rank) == [0, 0]


def test_a_rank_without_a_gpu_takes_part(two_gpus):
    def on_rank():
        own = communicator(True)
        cards = take_device(GPU(1) if own.rank else CPU, own, Library(two_gpus))
        return [card and card.index for card in cards]

    assert run_ranks(2, on_rank) == [[None, 1], [None, 1]]


def test_a_gpu_that_cannot_be_seen_is_left_alone(two_gpus):
    library = Library(two_gpus)
    assert take_device(GPU(2), None, library) == () and library.taken == []


def test_a_rank_alone_takes_its_gpu_without_a_call(two_gpus):
    library = Library(two_gpus)
    (card,) = take_device(GPU(1), None, library)
    assert card.index == 1 and library.taken == [1]
    with pytest.raises(DeviceError, match="^GPU 0 cannot be used: cudaErrorDevicesUnavailable"):
        take_device(GPU(0), None, Library(two_gpus, busy=0))


@pytest.mark.parametrize(
    ("make", "taken"),
    [
        (lambda: OneDeviceStrategy("/gpu:1"), [1]),
        (lambda: OneDeviceStrategy("/cpu:0"), []),
        (lambda: MirroredStrategy(["/gpu:1"]), [1]),
        (MirroredStrategy, [0]),
    ],
)
def test_strategies_take_the_gpu_they_name(two_gpus, monkeypatch, make, taken):
    library = Library(two_gpus)
    monkeypatch.setattr(devices_of_ranks, "cupy", lambda: library)
    strategy = make()
    assert library.taken == taken
    assert strategy.extended.card_text in ("", *(f"card {index} {two_gpus[index].upper()}" for index in taken))


def test_parts_of_a_world_may_have_gpus_as_the_whole():
    def on_rank():
        whole = world()
        return [replace(whole, has_gpus=has).part(whole.rank % 2).has_gpus for has in (True, False)]

    assert run_ranks(3, on_rank) == [[True, False]] * 3


def test_a_world_of_one_rank_makes_no_call(two_gpus):
    own = Communicator(alone())
    assert [card.index for card in take_device(GPU(1), own, Library(two_gpus))] == [1]
    assert own.control.call == 0
