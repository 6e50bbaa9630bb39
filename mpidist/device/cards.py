"""Cards: which GPU each rank has, by machine and PCI bus id, and so who shares one."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mpidist.errors import DeviceError, listed
from mpidist.own_machine import boot_id

#: The first version of NCCL that lets several ranks have one card, and the variable that says so.
SHARING_VERSION, SHARING_VARIABLE = 23000, "NCCL_MULTI_RANK_GPU_ENABLE"

#: The numbers of the GPUs that were taken in this process.
_taken: set[int] = set()


@dataclass(frozen=True)
class Card:
    """The GPU of a rank."""

    machine: str  # where it is: alike for all processes of a machine, in containers too
    bus_id: str  # its place there, as in ``0000:0A:00.0``
    index: int  # its number among those that its rank sees
    name: str

    @property
    def place(self) -> str:
        """Where it is, alike for all who see it."""
        return f"{self.machine} {self.bus_id}"

    def __str__(self) -> str:
        return f"{self.name} {self.bus_id}"


def cupy() -> Any:
    """Return CuPy, for a process that has GPUs by it.  Local."""
    import cupy

    return cupy


def card_of(library: Any, index: int) -> Card:
    """Return the GPU of that number among those that this process sees.  Local.

    `library`: CuPy.
    """
    facts = library.cuda.runtime.getDeviceProperties(index)
    return _card(library, index, facts["name"].decode())


def place_of(library: Any, index: int) -> str:
    """Return the place of the GPU of that number.  Local; parameters as for `card_of`."""
    return _card(library, index, "").place


def _card(library: Any, index: int, name: str) -> Card:
    """Return the GPU of that number, under a name."""
    return Card(boot_id() or platform.node(), str(library.cuda.Device(index).pci_bus_id).upper(), index, name)


def current_card(library: Any) -> Card:
    """Return the GPU that is CuPy's current device in this thread.  Local; parameter as for `card_of`."""
    return card_of(library, library.cuda.runtime.getDevice())


def take_card(library: Any, index: int) -> Card:
    """Make a GPU CuPy's current device in this thread, and return it.  Local; parameters as for `card_of`."""
    library.cuda.Device(index).use()
    _taken.add(index)
    return card_of(library, index)


def places_without_choice(library: Any) -> list[str]:
    """Return the places of all GPUs that this process sees, if it is on CUDA's first one by nobody's choice; else none.

    Local; parameter as for `card_of`.
    """
    if library.cuda.runtime.getDevice() or 0 in _taken:
        return []
    return [place_of(library, index) for index in range(library.cuda.runtime.getDeviceCount())]


def shared_cards(cards: Sequence[Card | None]) -> tuple[tuple[int, ...], ...]:
    """Return the ranks that have a card together: a tuple for each card of two ranks or more.  Local.

    All ranks have the same answer.  It is empty where every rank has a card of its own, or none.

    `cards`: by rank; None for a rank without a GPU.
    """
    ranks_of: dict[str, list[int]] = {}
    for rank, card in enumerate(cards):
        if card is not None:
            ranks_of.setdefault(card.place, []).append(rank)
    return tuple(tuple(ranks) for ranks in ranks_of.values() if len(ranks) > 1)


def idle_hint(cards: Sequence[Card | None], seen: Sequence[Sequence[str]]) -> str:
    """Return a warning where ranks share a card, and one of them, whose card nobody chose, sees an idle one; else "".

    Local, and the same on all ranks.

    `cards`: by rank.  `seen`: by rank `places_without_choice`.
    """
    used = {card.place for card in cards if card is not None}
    for ranks in shared_cards(cards):
        rank = next((rank for rank in ranks if not used.issuperset(seen[rank])), None)
        if rank is not None:
            count, idle = len(seen[rank]), len({*seen[rank]} - used)
            return (
                f"ranks {listed(map(str, ranks))} have one GPU, {cards[rank]}, and no rank has {idle} of the {count} "
                "that they see: where nobody chooses, CUDA takes the first. Make a strategy before the arrays, or call "
                "mpidist.torch.device() or mpidist.jax.device(), or for CuPy alone, and in a thread of your own, "
                f"cupy.cuda.Device(mpidist.local_rank() % {count}).use()"
            )
    return ""


def sharing_problem(nccl_version: int, environ: Mapping[str, str] | None = None) -> str:
    """Return why NCCL does not let several ranks have one card; empty where it does.  Local.

    `nccl_version`: as NCCL says it: 23203 is 2.32.3.  `environ`: by default that of the process.
    """
    if nccl_version < SHARING_VERSION:
        return f"NCCL is {dotted_nccl(nccl_version)}, and 2.30 or newer can do it"
    value = (os.environ if environ is None else environ).get(SHARING_VARIABLE, "")
    return "" if value == "1" else f"{SHARING_VARIABLE}=1 is not set"


def dotted_nccl(number: int) -> str:
    """Return NCCL's version number as people write it: 22304 is 2.23.4."""
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


def exchange_cards(
    own: Card | None,
    problem: str,
    exchange: Callable[[bytes], Sequence[bytes]],
    name_fn: Callable[[int], str] = "rank {}".format,
) -> tuple[Card | None, ...]:
    """Return by rank the card it has, None where it has none.

    Collective: every rank calls it in the same order.

    `own`: this rank's.  `problem`: why this rank cannot use its card; empty if it can, or has none.  `exchange`:
    ``exchange(payload)`` returns what every rank gave.  `name_fn`: ``name_fn(rank)`` is how messages call a rank.
    DeviceError, on all ranks: a rank cannot use its card.
    """
    answers = [json.loads(raw) for raw in exchange(json.dumps([problem, own and asdict(own)]).encode())]
    problems = [f"{name_fn(rank)}: {text}" for rank, (text, _) in enumerate(answers) if text]
    if problems:
        raise DeviceError("; ".join(problems))
    return tuple(Card(**facts) if facts else None for _, facts in answers)


def card_text(rank: int, cards: Sequence[Card | None]) -> str:
    """Return the card of a rank and who shares it, such as ``NAME 0000:0A:00.0, shared with rank 1``.  Local.

    Empty where it has none, also where `cards` is empty.
    """
    card = cards[rank] if cards else None
    return "" if card is None else ", ".join(filter(None, [str(card), _shared_with(rank, cards)]))


def card_table(cards: Sequence[Card | None], hosts: Sequence[str], notes: Mapping[int, str] | None = None) -> str:
    """Return which rank has which card, a line for each rank, and who shares it.  Local.

    `notes`: by rank what is said of one without a card.
    """
    rows = [
        (f"rank {rank}", hosts[rank], *_columns(card), _shared_with(rank, cards) or (notes or {}).get(rank, ""))
        for rank, card in enumerate(cards)
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(["GPUs of the ranks:", *(f"  {line}".rstrip() for line in lines)])


def _shared_with(rank: int, cards: Sequence[Card | None]) -> str:
    """Return who else has the card of a rank; empty where nobody has."""
    others = [str(other) for ranks in shared_cards(cards) if rank in ranks for other in ranks if other != rank]
    return f"shared with rank{'s' if len(others) > 1 else ''} {', '.join(others)}" if others else ""


def _columns(card: Card | None) -> tuple[str, str, str]:
    return ("no GPU", "", "") if card is None else (f"GPU:{card.index}", card.name, card.bus_id)
