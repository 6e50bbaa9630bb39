"""The devices of the ranks: which each of them takes, and whether it can be seen."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from mpidist import arrays
from mpidist.cluster.devices import (
    Device,
    device_of_rank,
    gpu_of_name,
    gpu_of_rank,
    gpus_by_turns,
    invisible_devices,
    parse_devices,
)
from mpidist.collectives.communicator import Communicator
from mpidist.device.cards import Card, card_table, cupy, exchange_cards, place_of, take_card
from mpidist.errors import DeviceError

_log = logging.getLogger("mpidist")

#: Under which names the GPUs of ranks, and the device that this one has without a strategy, are kept with their ranks.
_GPUS, OWN_DEVICE = "gpus", "own_device"


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


def gpus_of_ranks(communicator: Communicator, library: Any = None, takes_one: bool = True) -> tuple[int | None, ...]:
    """Return by rank the number of its GPU among those that it sees, None where it has none; see `gpus_by_turns`.

    Collective where several ranks may have GPUs, ``communicator.has_gpus``, at the first call with these ranks.

    `library` is CuPy; `takes_one`: whether this rank wants a GPU.
    """
    if communicator.size == 1 or not communicator.has_gpus:
        seen = gpu_count() if takes_one else 0
        return tuple(gpu_of_rank(local_rank, seen) for local_rank in communicator.topology.local_rank_of)
    if _GPUS not in communicator.adapters:
        payload = json.dumps(_seen(library) if takes_one else []).encode()
        answers = communicator.exchange(payload, what="GPUs that ranks see")
        communicator.adapters[_GPUS] = gpus_by_turns([json.loads(raw) for raw in answers])
    found: tuple[int | None, ...] = communicator.adapters[_GPUS]
    return found


def forget_gpus(communicator: Communicator) -> None:
    """Have the GPUs of these ranks be dealt out anew when they are asked for next, alike on all ranks.  Local."""
    communicator.adapters.pop(_GPUS, None)


def _seen(library: Any) -> list[str]:
    """Return the GPUs that this rank sees, by names that are alike on all ranks."""
    try:
        return [place_of(cupy() if library is None else library, gpu) for gpu in range(gpu_count())]
    except RuntimeError:  # as all errors of CUDA are: it comes again, on all ranks, where the GPU is taken
        return [str(gpu) for gpu in range(gpu_count())]


def devices_of_ranks(devices: Sequence[str | Device] | None, communicator: Communicator) -> tuple[Device, ...]:
    """Return the device of every rank of a node: those asked for, else its GPU, or CPU i without GPUs.

    Collective as `gpus_of_ranks`, unless devices are asked for.
    """
    rank, size = communicator.rank, communicator.size
    device_of_rank(rank, size, devices)  # checks that there are as many devices as ranks, and names the cure
    if devices:
        return parse_devices(devices)
    return tuple(device_of_rank(other, size, gpu=gpu) for other, gpu in enumerate(gpus_of_ranks(communicator)))


def own_device(communicator: Communicator, takes_gpu: bool = True) -> Device:
    """Return the device of this rank, a CPU as the ``"CPU:0"`` of a task; `takes_gpu`: whether it wants a GPU.

    Collective as `gpus_of_ranks`.
    """
    gpu = gpus_of_ranks(communicator, takes_one=takes_gpu)[communicator.rank]
    return Device("CPU", 0) if gpu is None else Device("GPU", gpu)


def take_device(
    device_name: str, communicator: Communicator | None, library: Any = None, notes: Mapping[int, str] | None = None
) -> tuple[Card | None, ...]:
    """Make this rank's GPU, if it has one, CuPy's current device; return by rank the card it has.

    Nothing where no rank may have a GPU; this rank's alone where there is no `communicator`.  Of several ranks, the
    chief logs the cards.

    Collective where several ranks may have GPUs, ``communicator.has_gpus``: every rank calls it in the same order.
    `device_name` is the full name of this rank's device; the ranks of `communicator` are told; `library` is CuPy;
    `notes`: as for `card_table`.  DeviceError where a rank cannot use its GPU; on all ranks, where it is collective.
    """
    card, problem = _taken(gpu_of_name(device_name), library)
    size = 1 if communicator is None else communicator.size
    if communicator is not None and size > 1 and communicator.has_gpus:
        exchange = partial(communicator.exchange, what="cards of the ranks")
        cards = exchange_cards(card, problem, exchange, communicator.control.name)
        if communicator.rank == 0 and any(cards):
            _log.info("%s", card_table(cards, communicator.topology.hosts, notes))
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
