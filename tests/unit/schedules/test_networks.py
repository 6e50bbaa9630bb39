"""The presets: named figures with sources, and what is said where a figure is missing."""

from __future__ import annotations

import pytest

from mpidist.schedules.cost import Level
from mpidist.schedules.networks import NETWORKS, network


@pytest.mark.parametrize("name", NETWORKS)
def test_every_network_has_a_source_and_a_year_or_product(name: str) -> None:
    preset = network(name)
    assert preset.name == name
    assert preset.bytes_per_second > 1e8
    assert any(character.isdigit() for character in preset.source)
    assert preset.alpha is None or 1e-7 < preset.alpha < 1e-3


@pytest.mark.parametrize(
    "name, gigabits", [("ethernet-10g", 10), ("infiniband-hdr", 200), ("infiniband-ndr", 400), ("slingshot-11", 200)]
)
def test_a_link_moves_the_bits_of_its_name(name: str, gigabits: int) -> None:
    assert network(name).bytes_per_second * 8 == pytest.approx(gigabits * 1e9)


@pytest.mark.parametrize("name, rate", [("pcie-3", 8e9), ("pcie-4", 16e9), ("pcie-5", 32e9)])
def test_sixteen_lanes_of_pcie(name: str, rate: float) -> None:
    assert network(name).bytes_per_second == pytest.approx(16 * rate * 128 / 130 / 8, rel=1e-3)


def test_a_level_has_the_figures_of_the_network_and_those_given() -> None:
    assert network("ethernet-10g").level() == Level(20e-6, 8e-10)
    assert network("ethernet-10g").level(alpha=1e-6, beta=2e-9, gamma=3e-9) == Level(1e-6, 2e-9, 3e-9)
    assert network("ethernet-1g").level(alpha=0.0) == Level(0.0, 8e-9)


def test_a_missing_latency_is_asked_for() -> None:
    with pytest.raises(ValueError, match="no latency of ethernet-1g is published"):
        network("ethernet-1g").level()


def test_an_unknown_network_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=f"'token-ring'; known ones: {', '.join(NETWORKS)}"):
        network("token-ring")
