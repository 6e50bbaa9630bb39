"""Figures of common networks, each with its source, for jobs on machines that are not at hand.

Bandwidth is that of one link in one direction, by specification; software reaches some of it.  A latency is here only
where one was published, and is mostly the adapter's: MPI, cables and switches come on top.
"""

from __future__ import annotations

from typing import NamedTuple

from mpidist.schedules.cost import Level


class Network(NamedTuple):
    """One kind of link."""

    name: str
    bytes_per_second: float  # in one direction
    alpha: float | None  # seconds a message; None where no source gives it
    source: str  # where the figures are published

    def level(self, alpha: float | None = None, beta: float | None = None, gamma: float = 0.0) -> Level:
        """Return the level of the cost model with this network's figures, and those given in place of its own (Local).

        ValueError where there is no latency, neither published nor given.
        """
        alpha = self.alpha if alpha is None else alpha
        if alpha is None:
            raise ValueError(f"no latency of {self.name} is published that could be cited; give one")
        return Level(alpha, 1.0 / self.bytes_per_second if beta is None else beta, gamma)


_TCP = "end-to-end latency of TCP: Hurwitz and Feng, Hot Interconnects, 2003"
_NCCL = "latency of a step of its rings: NCCL, src/graph/tuning.cc, 2020"

_KNOWN = (
    # between nodes
    Network("ethernet-1g", 1e9 / 8, None, "IEEE 802.3ab, 1999"),
    Network("ethernet-10g", 10e9 / 8, 20e-6, f"IEEE 802.3ae, 2002; {_TCP}"),
    Network("ethernet-25g", 25e9 / 8, None, "IEEE 802.3by, 2016"),
    Network("ethernet-100g", 100e9 / 8, None, "IEEE 802.3ba, 2010"),
    Network("roce-100g", 100e9 / 8, 0.6e-6, "IEEE 802.3ba, 2010; latency: Mellanox ConnectX-5 EN product brief"),
    Network("infiniband-hdr", 200e9 / 8, 0.6e-6, "NVIDIA ConnectX-6 user manual"),
    Network("infiniband-ndr", 400e9 / 8, None, "NVIDIA ConnectX-7 user manual"),
    Network("slingshot-11", 200e9 / 8, None, "HPE Slingshot, 200 Gbit/s adapter"),
    # inside
    Network("pcie-3", 15.75e9, 5.7e-6, f"16 lanes of 8 GT/s in 128b/130b: PCI-SIG, 2010; {_NCCL}"),
    Network("pcie-4", 31.5e9, 5.7e-6, f"16 lanes of 16 GT/s in 128b/130b: PCI-SIG, 2017; {_NCCL}"),
    Network("pcie-5", 63.0e9, 5.7e-6, f"16 lanes of 32 GT/s in 128b/130b: PCI-SIG, 2019; {_NCCL}"),
    Network("nvlink-2", 150e9, 3.4e-6, f"300 GB/s both ways: NVIDIA Tesla V100 whitepaper, 2017; {_NCCL}"),
    Network("nvlink-3", 300e9, 3.4e-6, f"600 GB/s both ways: NVIDIA A100 whitepaper, 2020; {_NCCL}"),
    Network("nvlink-4", 450e9, 3.4e-6, f"900 GB/s both ways: NVIDIA H100 whitepaper, 2022; {_NCCL}"),
    Network("nvlink-5", 900e9, 3.4e-6, f"1.8 TB/s both ways: NVIDIA Blackwell technical brief, 2024; {_NCCL}"),
)

#: Every network by name: those between nodes, then those inside.
NETWORKS: dict[str, Network] = {network.name: network for network in _KNOWN}


def network(name: str) -> Network:
    """Return a network by name; ValueError lists those there are (Local)."""
    try:
        return NETWORKS[name]
    except KeyError:
        raise ValueError(f"no network is called {name!r}; known ones: {', '.join(NETWORKS)}") from None
