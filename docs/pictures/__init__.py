"""The pictures of README and docs, each drawn by a function, light and dark: ``make pictures`` writes the SVG files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from docs.pictures import bars, failure, layers, push, roles, rounds, scaling, steps, timeline
from docs.pictures.svg import THEMES, Drawing, Theme

FOLDER = Path(__file__).resolve().parent

#: By the beginning of the file's name: what draws it.
PICTURES: dict[str, Callable[[Theme], Drawing]] = {
    "step": steps.step,
    "fused_step": steps.fused_step,
    "ring": rounds.ring,
    "recursive_doubling": rounds.recursive_doubling,
    "two_levels": rounds.two_levels,
    "failure": failure.failure,
    "coordinator": roles.coordinator,
    "between_graph": roles.between_graph,
    "push": push.push,
    "layers": layers.layers,
    "gradients": bars.gradients,
    "servers": bars.servers,
    "torch_steps": bars.torch_steps,
    "central_memory": bars.central_memory,
    "scaling": scaling.scaling,
    "timeline": timeline.timeline,
}


def files() -> dict[Path, str]:
    """Return every file of a picture, and what stands in it."""
    return {
        FOLDER / f"{name}-{theme}.svg": draw(colours).text()
        for name, draw in PICTURES.items()
        for theme, colours in THEMES.items()
    }
