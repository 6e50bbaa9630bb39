"""The devices of the ranks: which each of them takes, and whether it can be seen."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

from mpidist import arrays
from mpidist.cluster.devices import Device, device_of_rank, gpu_of_name, invisible_devices, parse_devices
from mpidist.cluster.topology import Topology
from mpidist.collectives.communicator import Communicator
from mpidist.device.cards import Card, card_table, cupy, exchange_cards, take_card
from mpidist.errors import DeviceError

_log = logging.getLogger("mpidist")


def gpu_count() -> int:
    """Return how many GPUs this rank can see.  Local."""
    return len(arrays.list_physical_devices("GPU"))


def warn_of_invisible(devices: Sequence[Device], is_chief: bool) -> None:
    """Log, on the chief, which of `devices` cannot be seen; using them will fail.  Local."""
    if not any(device.kind == "GPU" for device in devices):
        return
    invisible = invisible_devices(devices, gpu_count())
    if invisible and is_chief:
        names = ",".join(device.name for device in invisible)
        _log.warning("Some requested devices in `tf.distribute.Strategy` are not visible to mpidist: %s", names)


def require_one_node(communicator: Communicator, title: str) -> None:
    """Raise RuntimeError unless all ranks are on one node.  Local; the same on all ranks."""
    topology = communicator.topology
    if topology.node_count > 1:
        raise RuntimeError(
            f"rank {communicator.rank} of {communicator.size}: {title} is for the devices of one machine, but "
            f"the ranks are on {topology.describe()}. Use MultiWorkerMirroredStrategy, which works across machines"
        )


def devices_of_ranks(devices: Sequence[str | Device] | None, communicator: Communicator) -> tuple[Device, ...]:
    """Return the device of every rank of a node: those asked for, else GPU i, or CPU i without GPUs.  Local."""
    rank, size = communicator.rank, communicator.size
    device_of_rank(rank, size, devices)  # checks that there are as many devices as ranks, and names the cure
    if devices:
        return parse_devices(devices)
    gpus = gpu_count()
    return tuple(device_of_rank(other, size, gpu_count=gpus) for other in range(size))


def device_on_node(topology: Topology, rank: int) -> Device:
    """Return the device of a rank whose node deals out its GPUs, a CPU as the ``"CPU:0"`` of a task.  Local."""
    device = device_of_rank(topology.local_rank_of[rank], topology.local_size_of[rank], gpu_count=gpu_count())
    return Device("CPU", 0) if device.kind == "CPU" else device


def take_device(device_name: str, communicator: Communicator | None, library: Any = None) -> tuple[Card | None, ...]:
    """Make this rank's GPU, if it has one, CuPy's current device; return by rank the card it has.

    Nothing where no rank may have a GPU; this rank's alone where there is no `communicator`.  Of several ranks, the
    chief logs the cards.

    Collective where several ranks may have GPUs, ``communicator.has_gpus``: every rank calls it in the same order.
    `device_name` is the full name of this rank's device; the ranks of `communicator` are told; `library` is CuPy.
    DeviceError where a rank cannot use its GPU; on all ranks, where it is collective.
    """
    card, problem = _taken(gpu_of_name(device_name), library)
    size = 1 if communicator is None else communicator.size
    if communicator is not None and size > 1 and communicator.has_gpus:
        exchange = partial(communicator.exchange, what="cards of the ranks")
        cards = exchange_cards(card, problem, exchange, communicator.control.name)
        if communicator.rank == 0 and any(cards):
            _log.info("%s", card_table(cards, communicator.topology.hosts))
        return cards
    if problem:
        raise DeviceError(problem)
    return (card,) if size == 1 and card is not None else ()


def _taken(gpu: int | None, library: Any) -> tuple[Card | None, str]:
    """Make a GPU that can be seen the current one; return it, or why that does not go."""
    if gpu is None or gpu >= gpu_count():
        return None, ""
    try:
        return take_card(cupy() if library is None else library, gpu), ""
    except RuntimeError as error:  # as all errors of CUDA are
        return None, (
            f"GPU {gpu} cannot be used: {error}. See with nvidia-smi whether its memory is full, or another process "
            "has it for itself; CUDA_VISIBLE_DEVICES, or `devices` of MirroredStrategy, names others"
        )
