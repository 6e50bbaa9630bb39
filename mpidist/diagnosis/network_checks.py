"""Checks of what is between nodes: interfaces, rates, clocks; and of the all-reduce over all of it."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from mpidist.diagnosis.case import Case, NodePair, Observation
from mpidist.diagnosis.finding import Finding, fail, ok, warn
from mpidist.errors import counted
from mpidist.reporting.quantities import show_bytes

#: Variables that name interfaces, a comma between them -> whether the beginning of a name is enough.
_CHOOSING = {
    "OMPI_MCA_btl_tcp_if_include": False,
    "OMPI_MCA_oob_tcp_if_include": False,
    "UCX_NET_DEVICES": False,
    "NCCL_SOCKET_IFNAME": True,
    "GLOO_SOCKET_IFNAME": False,
}

#: A pair with less than this share of what is usual is slow; so is one below the other: a Gbit/s, and a little off.
_SLOW_SHARE, _SLOW_RATE = 0.5, 1e8

#: Clocks may be so far apart, in seconds: dates of files then still tell which one is newer.
_APART_SECONDS = 1.0


def check_interfaces(case: Case) -> Iterator[Finding]:
    """Find variables that name an interface which a node lacks, and nodes without one in common."""
    wrong = list(_wrongly_chosen(case))
    yield from wrong
    names = [set(rank.interfaces) for rank in case.ranks]
    common = sorted(set.intersection(*names))
    if len(case.ranks_of_host) > 1 and not common:
        shown = "; ".join(f"{rank.host} {', '.join(rank.interfaces) or 'none'}" for rank in _one_a_host(case))
        yield warn(f"no name is on all nodes: {shown}", "export OMPI_MCA_btl_tcp_if_include=NETWORK/BITS")
    elif not wrong:
        ports = sorted(set.intersection(*(set(rank.ports) for rank in case.ranks)))
        infiniband = f"; InfiniBand {', '.join(ports)}" if ports else ""
        where = "here" if len(case.ranks_of_host) == 1 else "on all nodes"
        yield ok(f"{', '.join(common) or 'none'} {where}{infiniband}")


def _wrongly_chosen(case: Case) -> Iterator[Finding]:
    for variable, by_beginning in _CHOOSING.items():
        for rank in _one_a_host(case):
            missing = _missing(rank.environ.get(variable, ""), rank, by_beginning)
            if missing:
                has = ", ".join([*rank.interfaces, *rank.ports]) or "none"
                yield fail(f"{variable} names {missing}, and {rank.host} has {has}", f"unset {variable}")
                break


def _missing(value: str, rank: Observation, by_beginning: bool) -> str:
    """Return the names in a variable if the node has none of them; empty where it has one, or they are no names."""
    names = value.removeprefix("=").split(",")
    if not value or value[0] == "^" or value == "all" or any("/" in name for name in names):
        return ""
    by_beginning = by_beginning and value[0] != "="
    there = [*rank.interfaces, *rank.ports, *(port.partition(":")[0] for port in rank.ports)]
    has = any(each.startswith(name) if by_beginning else each == name for name in names for each in [*there, "lo"])
    return "" if has else value


def _one_a_host(case: Case) -> list[Observation]:
    return [case.ranks[ranks[0]] for ranks in case.ranks_of_host.values()]


def check_pairs(case: Case) -> Iterator[Finding]:
    """Find pairs of nodes that are slow, and traffic beside an InfiniBand that is there."""
    pairs = case.joint.pairs if case.joint is not None else ()
    if not pairs:
        return
    usual = statistics.median(pair.bytes_per_second for pair in pairs)
    slow = [pair for pair in pairs if pair.bytes_per_second < max(_SLOW_SHARE * usual, _SLOW_RATE)]
    for pair in sorted(slow, key=lambda pair: pair.bytes_per_second)[:4]:
        first, second = pair.nodes
        than = f", the others {_rate(usual)}" if len(pairs) > 1 else ", less than 1 Gbit/s"
        yield warn(
            f"{first} - {second}: {_rate(pair.bytes_per_second)}{_through(pair.through)}{than}", _without(case, slow)
        )
    beside = [pair for pair in pairs if pair.through and _has_ports(case, pair.nodes[0]) and ":" not in pair.through]
    if beside:
        text = f"{' - '.join(beside[0].nodes)} go through {beside[0].through}, beside the InfiniBand that is active"
        yield warn(text, "export OMPI_MCA_pml=ucx")
    if not slow and not beside:
        best = max(pairs, key=lambda pair: pair.bytes_per_second)
        yield ok(f"{counted(len(pairs), 'pair')}: {_rate(usual)}{_through(best.through)}")


def _without(case: Case, slow: Sequence[NodePair]) -> str:
    """Return what leaves out the node that has most of the slow pairs."""
    nodes = [node for pair in slow for node in pair.nodes]
    worst = max(nodes, key=nodes.count)
    if case.launcher is not None and "Slurm" in case.launcher.name:
        return f"sbatch --exclude={worst}"
    others = [host for host in case.ranks_of_host if host != worst]
    return f"mpidist run --hosts {','.join(others[:8])}"


def _has_ports(case: Case, node: str) -> bool:
    return any(rank.ports for rank in case.ranks if rank.host == node)


def _through(interface: str) -> str:
    return f" through {interface}" if interface else ""


def _rate(bytes_per_second: float) -> str:
    return f"{show_bytes(bytes_per_second)}/s"


def check_clocks(case: Case) -> Iterator[Finding]:
    """Find nodes whose clock differs."""
    clocks = case.joint.clocks if case.joint is not None else {}
    apart = {node: ahead for node, ahead in clocks.items() if abs(ahead) > _APART_SECONDS}
    for node, ahead in apart.items():
        text = f"that of {node} is {abs(ahead):.1f} s {'ahead' if ahead > 0 else 'behind'}: dates of files mislead"
        yield warn(text, f"ssh {node} sudo chronyc makestep")
    if clocks and not apart:
        yield ok(f"at most {max(map(abs, clocks.values())) * 1e3:.1f} ms apart")


def check_all_reduce(case: Case) -> Iterator[Finding]:
    """Find whether one real all-reduce was right on all ranks."""
    joint = case.joint
    if joint is None or case.size == 1:
        return
    if joint.reduction_error:
        yield fail(
            joint.reduction_error,
            f"MPIDIST_SHARED_MEMORY=0 MPIDIST_ALGORITHM=native mpidist run -n {case.size} -m mpidist doctor",
        )
    elif joint.reduction_bytes:
        yield ok(f"{show_bytes(joint.reduction_bytes)}, right on {case.size} ranks")
