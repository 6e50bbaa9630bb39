"""`mpidist.torch.device` and `mpidist.jax.device`: this rank's GPU, on a machine whose GPUs are pretended."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import jax
import pytest
import torch

import mpidist.jax
import mpidist.torch
from mpidist import arrays
from mpidist.errors import DeviceError
from mpidist.strategies import devices_of_ranks
from mpidist.world import world_communicator
from tests.unit.device.test_cards import Library

pytestmark = pytest.mark.mpi

THREE = ["0000:0a:00.0", "0000:0b:00.0", "0000:0c:00.0"]


def rank():
    return world_communicator().rank


@pytest.fixture
def shows(monkeypatch):
    """Return what has CuPy and PyTorch see GPUs, by their bus ids; it returns CuPy, and the GPUs that PyTorch took."""

    def see(bus_ids, busy=None, has_cupy=True):
        library, taken = Library(bus_ids, busy), []
        seen = [SimpleNamespace()] * len(bus_ids) if has_cupy else []
        monkeypatch.setattr(arrays, "list_physical_devices", lambda device_type=None: seen)
        monkeypatch.setattr(devices_of_ranks, "cupy", lambda: library)
        monkeypatch.setattr(world_communicator(), "has_gpus", has_cupy)
        monkeypatch.setattr(world_communicator(), "adapters", {})  # what these ranks know of their GPUs is forgotten
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(bus_ids))
        monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(bus_ids))
        monkeypatch.setattr(torch.cuda, "set_device", taken.append)
        return library, taken

    return see


@pytest.mark.parametrize(
    ("bus_ids_fn", "expected_fn"),
    [
        (lambda rank: THREE, lambda rank: rank % 3),
        (lambda rank: THREE[:2], lambda rank: rank % 2),
        (lambda rank: [THREE[rank % 3]], lambda rank: 0),  # the launcher shows each rank its own
        (lambda rank: THREE[:1], lambda rank: 0),
        # ranks of even and odd numbers see those of two sockets
        (lambda rank: [f"0000:{rank % 2}{number}:00.0" for number in range(2)], lambda rank: rank // 2 % 2),
    ],
)
@pytest.mark.parametrize("has_cupy", [True, False])
def test_the_gpu_of_a_rank_becomes_the_current_one(shows, bus_ids_fn, expected_fn, has_cupy):
    library, taken = shows(bus_ids_fn(rank()), has_cupy=has_cupy)
    expected = expected_fn(rank()) if has_cupy else rank() % len(bus_ids_fn(rank()))
    assert mpidist.torch.device() == torch.device("cuda", expected)
    assert taken == [expected] and library.taken == ([expected] if has_cupy else [])


def test_only_the_first_call_is_collective(shows):
    _, taken = shows(THREE)
    found, calls = mpidist.torch.device(), world_communicator().control.call
    if rank() == 0:
        assert mpidist.torch.device() == found and len(taken) == 2
    assert world_communicator().control.call == calls


def test_the_chief_shows_who_shares_a_card(shows, caplog):
    caplog.set_level(logging.INFO, logger="mpidist")
    shows(THREE[:1])
    mpidist.torch.device()
    tables = [record.getMessage() for record in caplog.records if "GPUs of the ranks" in record.getMessage()]
    size = world_communicator().size
    assert len(tables) == (rank() == 0 and size > 1)
    assert sum(table.count("shared with") for table in tables) == (size if tables else 0)


def test_a_gpu_that_cannot_be_used_is_an_error_on_all_ranks(shows):
    shows(THREE, busy=0)
    with pytest.raises(DeviceError, match="GPU 0 cannot be used: cudaErrorDevicesUnavailable"):
        mpidist.torch.device()


@pytest.mark.parametrize(("name", "expected"), [("/gpu:2", "cuda:2"), ("/cpu:0", "cpu")])
def test_in_the_scope_of_a_strategy_it_is_the_device_of_the_strategy(shows, name, expected):
    library, _ = shows(THREE)
    with mpidist.OneDeviceStrategy(name).scope():
        calls = world_communicator().control.call
        assert mpidist.torch.device() == torch.device(expected)
        assert world_communicator().control.call == calls
    assert library.taken == ([2] if name == "/gpu:2" else [])


@pytest.mark.parametrize("has_cupy", [True, False])
def test_without_gpus_it_is_the_cpu(shows, has_cupy):
    _, taken = shows([], has_cupy=has_cupy)
    assert mpidist.torch.device() == torch.device("cpu") and taken == []
    assert mpidist.jax.device() == jax.local_devices()[0]


def test_frameworks_for_cpus_are_none_of_a_gpu(shows, monkeypatch):
    _, taken = shows(THREE)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert mpidist.torch.device() == torch.device("cpu") and taken == []
    monkeypatch.setattr(jax.config, "update", lambda name, value: None)
    assert mpidist.jax.device() == jax.local_devices()[0]


@pytest.mark.parametrize("is_early", [True, False])
@pytest.mark.parametrize("has_cupy", [True, False])
def test_jax_computes_on_the_gpu_of_the_rank(shows, monkeypatch, is_early, has_cupy):
    shows(THREE, has_cupy=has_cupy)
    gpus = [SimpleNamespace(platform="gpu", local_hardware_id=index) for index in range(3)]
    updates: dict[str, object] = {}
    monkeypatch.setattr(jax.config, "update", updates.__setitem__)

    def local_devices():
        chosen = updates.get("jax_cuda_visible_devices") if is_early else None
        return gpus if chosen is None else [gpus[int(chosen)]]

    monkeypatch.setattr(jax, "local_devices", local_devices)
    assert mpidist.jax.device() is gpus[rank() % 3]
    assert updates["jax_default_device"] is gpus[rank() % 3]
