"""Checks of GPUs: whether there are any, who shares one, and whether MPI takes arrays in their memory."""

from __future__ import annotations

from collections.abc import Iterator

from mpidist.arrays import GET_CUPY
from mpidist.cluster.devices import gpus_by_turns
from mpidist.diagnosis.case import Case, ranks_text
from mpidist.diagnosis.finding import Finding, ok, warn


def check_cards(case: Case) -> Iterator[Finding]:
    """Find GPUs that cannot be used, and ranks that share one while another is free."""
    if not any(each.has_driver for each in case.ranks):
        yield ok("none: not probed")
        return
    unusable = [rank for rank, each in enumerate(case.ranks) if each.has_driver and not each.cuda.get("cards")]
    if unusable:
        first = case.ranks[unusable[0]]
        why = first.cuda.get("error", "CUDA shows none")
        cure = GET_CUPY.split(" (")[0] if "cupy" not in first.cuda else "nvidia-smi"
        yield warn(f"{ranks_text(unusable)} ({first.host}) cannot use those that are there: {why}", cure)
        return
    shared = [*_shared(case)]
    yield from shared
    if not shared:
        counts = {len(each.cuda.get("cards", ())) for each in case.ranks}
        yield ok(f"{' or '.join(map(str, sorted(counts)))} seen by each rank, and no two ranks share one")


def _shared(case: Case) -> Iterator[Finding]:
    """Yield a finding for each node on which ranks share a GPU."""
    for host, ranks in case.ranks_of_host.items():
        ranks_of: dict[str, list[int]] = {}
        seen = [[card[2] for card in case.ranks[rank].cuda.get("cards", ())] for rank in ranks]
        there = {card for cards in seen for card in cards}
        for rank, cards, index in zip(ranks, seen, gpus_by_turns(seen), strict=True):
            if index is not None:
                ranks_of.setdefault(cards[index], []).append(rank)
        together = [(card, some) for card, some in ranks_of.items() if len(some) > 1]
        if together and len(ranks_of) < len(there):
            card, some = together[0]
            text = f"{host}: {ranks_text(some)} share {card}, while {len(there) - len(ranks_of)} GPUs are free"
            yield warn(text, "srun --gpus-per-node=N --gpu-bind=none")
        elif together:
            text = f"{host}: {len(ranks)} ranks share {len(there)} GPUs"
            yield warn(text, f"mpidist run -n {len(there)}; srun --ntasks-per-node={len(there)}")


def check_card_buffers(case: Case) -> Iterator[Finding]:
    """Find whether MPI takes arrays in GPU memory."""
    if not any(each.has_driver for each in case.ranks):
        return
    answer = case.own.mpi_takes_cards
    if answer == "yes":
        yield ok("MPI takes arrays in GPU memory")
    elif answer:
        yield ok(f"MPI does not take arrays in GPU memory ({answer}); NCCL or the host carry them")
